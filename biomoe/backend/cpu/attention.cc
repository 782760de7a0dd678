// Blocked attention with the softmax kept as a running maximum and sum (Milakov and Gimelshein, 2018; Dao et
// al., "FlashAttention", 2022); backward recomputes the probabilities from lse.
#include "biomoe/ops/attention.h"

#include <limits>
#include <new>

#include "biomoe/backend/cpu/attention_blocks.h"
#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/sgemm.h"
#include "biomoe/backend/cpu/vector_math.h"

namespace biomoe::cpu {
namespace {

float* allocate_floats(Arena& arena, int64_t count) {
  return static_cast<float*>(arena.allocate(static_cast<size_t>(count) * sizeof(float)));
}

// A NaN is passed over. By lanes, since g++ vectorises no maximum of floats as a reduction.
BIOMOE_ROW_KERNEL float row_maximum(const float* x, int64_t count) {
  constexpr int64_t kLanes = 32;
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    }
  }
  for (; i < count; ++i) lanes[0] = std::max(lanes[0], x[i]);
  return *std::max_element(lanes, lanes + kLanes);
}

// x = exp(x - shift), and the sum of it.
BIOMOE_ROW_KERNEL float row_exponentials(float* x, int64_t count, float shift) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    x[i] = exp_f32(x[i] - shift);
    sum += x[i];
  }
  return sum;
}

BIOMOE_ROW_KERNEL void row_scaled(float* y, const float* x, int64_t count, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[i] = x[i] * factor;
}

BIOMOE_ROW_KERNEL float row_dot(const float* x, const float* y, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

// From scores and dp = d loss / d p: scores becomes p, dp becomes d loss / d scores.
BIOMOE_ROW_KERNEL void row_score_gradients(float* scores, float* dp, int64_t count, float lse, float delta) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = exp_f32(scores[i] - lse);
    dp[i] = scores[i] * (dp[i] - delta);
  }
}

void zero_outside(float* row, Range inside, int64_t count) {
  std::fill(row, row + inside.begin, 0.0f);
  std::fill(row + inside.end, row + count, 0.0f);
}

// A band of heads: head h of token t starts at data + t * stride + h * K.
struct Heads {
  Heads(const TensorView& view, const AttentionShape& shape)
      : data(view.f32()), stride(view.row_stride), width(shape.head_dim) {}
  float* at(int64_t token, int64_t head) const { return data + token * stride + head * width; }
  Matrix matrix(int64_t token, int64_t head) const { return {at(token, head), stride, false}; }

  float* data;
  int64_t stride;
  int64_t width;
};

Matrix transposed(Matrix matrix) {
  matrix.transposed = !matrix.transposed;
  return matrix;
}

// A query block together with the key/value head that its group of query heads reads.
struct Work {
  QueryBlock block;
  int64_t kv_head = 0;
};

// visit(row, token, head) for each row of the block's matrices; token counts from the start of the batch.
template <typename Visit>
void for_each_row(const AttentionBlocks& blocks, const Work& work, const Visit& visit) {
  for (int64_t member = 0; member < blocks.group; ++member) {
    for (int64_t i = 0; i < work.block.count; ++i) {
      visit(member * work.block.count + i, work.block.sequence.begin + work.block.begin + i,
            work.kv_head * blocks.group + member);
    }
  }
}

// visit(Range) for each chunk of the keys that the block sees, counted from the start of the sequence.
template <typename Visit>
void for_each_chunk(const AttentionBlocks& blocks, const QueryBlock& block, const Visit& visit) {
  const int64_t end = block.begin + block.count;
  for (int64_t key = blocks.first_key(block.begin); key < end; key += blocks.kKeys) {
    visit(Range{key, std::min(key + blocks.kKeys, end)});
  }
}

struct ForwardPass {
  AttentionBlocks blocks;
  Heads q, k, v, out;
  float* lse;  // null: not wanted
  int64_t lse_stride;
  int64_t first_query;  // the token whose rows q and out begin with
};

struct ForwardScratch {
  ForwardScratch(Arena& arena, const AttentionBlocks& blocks)
      : q(allocate_floats(arena, blocks.max_rows() * blocks.shape.head_dim)),
        out(allocate_floats(arena, blocks.max_rows() * blocks.shape.head_dim)),
        scores(allocate_floats(arena, blocks.max_rows() * blocks.kScoreStride)),
        maximum(allocate_floats(arena, blocks.max_rows())),
        sum(allocate_floats(arena, blocks.max_rows())) {}
  float *q, *out, *scores, *maximum, *sum;
};

// Turns the scores of one chunk into exp(score - running maximum), and brings the sums and outputs of the
// chunks before it to that maximum.
void softmax_chunk(const AttentionBlocks& blocks, const QueryBlock& block, Range chunk, bool first,
                   const ForwardScratch& scratch) {
  const int64_t width = blocks.shape.head_dim;
  for (int64_t row = 0; row < blocks.group * block.count; ++row) {
    float* scores = scratch.scores + row * blocks.kScoreStride;
    const Range inside = visible_keys(blocks, block.begin + row % block.count, chunk);
    zero_outside(scores, inside, chunk.count());
    if (first) {
      scratch.maximum[row] = -std::numeric_limits<float>::infinity();
      scratch.sum[row] = 0.0f;
    }
    if (inside.count() == 0) continue;
    const float before = scratch.maximum[row];
    const float maximum = std::max(before, row_maximum(scores + inside.begin, inside.count()));
    const float kept = exp_f32(before - maximum);
    const float sum = row_exponentials(scores + inside.begin, inside.count(), maximum);
    scratch.sum[row] = scratch.sum[row] * kept + sum;
    scratch.maximum[row] = maximum;
    if (!first) row_scaled(scratch.out + row * width, scratch.out + row * width, width, kept);
  }
}

void forward_block(const ForwardPass& pass, const Work& work, const ForwardScratch& scratch) {
  const AttentionBlocks& blocks = pass.blocks;
  const int64_t width = blocks.shape.head_dim;
  const int64_t rows = blocks.group * work.block.count;
  const int64_t first_token = work.block.sequence.begin;
  for_each_row(blocks, work, [&](int64_t row, int64_t token, int64_t head) {
    row_scaled(scratch.q + row * width, pass.q.at(token - pass.first_query, head), width, blocks.scale);
  });
  bool first = true;
  for_each_chunk(blocks, work.block, [&](Range chunk) {
    const int64_t token = first_token + chunk.begin;
    const Matrix scores{scratch.scores, blocks.kScoreStride, false};
    sgemm({.data = scratch.scores,
           .stride = blocks.kScoreStride,
           .rows = rows,
           .columns = chunk.count(),
           .inner = width},
          {scratch.q, width, false}, transposed(pass.k.matrix(token, work.kv_head)));
    softmax_chunk(blocks, work.block, chunk, first, scratch);
    sgemm({.data = scratch.out,
           .stride = width,
           .rows = rows,
           .columns = width,
           .inner = chunk.count(),
           .accumulate = !first},
          scores, pass.v.matrix(token, work.kv_head));
    first = false;
  });
  for_each_row(blocks, work, [&](int64_t row, int64_t token, int64_t head) {
    float* out = pass.out.at(token - pass.first_query, head);
    row_scaled(out, scratch.out + row * width, width, 1.0f / scratch.sum[row]);
    if (pass.lse)
      pass.lse[head * pass.lse_stride + token] = scratch.maximum[row] + std::log(scratch.sum[row]);
  });
}

// Row sums of dk and dv for the keys of one sequence and head.
struct KeyGradients {
  float* dk;
  float* dv;
  int64_t dk_stride;
  int64_t dv_stride;
};

struct BackwardPass {
  AttentionBlocks blocks;
  Heads q, k, v, out, dout, dq, dk, dv;
  const float* lse;
  int64_t lse_stride;
  int64_t tokens;
  int64_t parts;
  // Sums of part p > 0, [parts - 1, T, G * K]; those of part 0 are made in dk and dv.
  float *dk_parts, *dv_parts;

  int64_t part_width() const { return blocks.shape.num_key_value_heads * blocks.shape.head_dim; }
  KeyGradients key_gradients(int64_t part, int64_t token, int64_t kv_head) const {
    if (part == 0) return {dk.at(token, kv_head), dv.at(token, kv_head), dk.stride, dv.stride};
    const int64_t offset = ((part - 1) * tokens + token) * part_width() + kv_head * blocks.shape.head_dim;
    return {dk_parts + offset, dv_parts + offset, part_width(), part_width()};
  }
};

struct BackwardScratch {
  BackwardScratch(Arena& arena, const AttentionBlocks& blocks)
      : q(allocate_floats(arena, blocks.max_rows() * blocks.shape.head_dim)),
        dout(allocate_floats(arena, blocks.max_rows() * blocks.shape.head_dim)),
        dq(allocate_floats(arena, blocks.max_rows() * blocks.shape.head_dim)),
        scores(allocate_floats(arena, blocks.max_rows() * blocks.kScoreStride)),
        dscores(allocate_floats(arena, blocks.max_rows() * blocks.kScoreStride)),
        lse(allocate_floats(arena, blocks.max_rows())),
        delta(allocate_floats(arena, blocks.max_rows())) {}
  float *q, *dout, *dq, *scores, *dscores, *lse, *delta;
};

void gather_block(const BackwardPass& pass, const Work& work, const BackwardScratch& scratch) {
  const int64_t width = pass.blocks.shape.head_dim;
  for_each_row(pass.blocks, work, [&](int64_t row, int64_t token, int64_t head) {
    const float* dout = pass.dout.at(token, head);
    row_scaled(scratch.q + row * width, pass.q.at(token, head), width, pass.blocks.scale);
    std::copy_n(dout, width, scratch.dout + row * width);
    scratch.lse[row] = pass.lse[head * pass.lse_stride + token];
    scratch.delta[row] = row_dot(dout, pass.out.at(token, head), width);
  });
}

// Probabilities and gradients of the scores of one chunk.
void chunk_score_gradients(const BackwardPass& pass, const Work& work, Range chunk,
                           const BackwardScratch& scratch) {
  const AttentionBlocks& blocks = pass.blocks;
  const QueryBlock& block = work.block;
  const int64_t width = blocks.shape.head_dim;
  const int64_t rows = blocks.group * block.count;
  const int64_t token = block.sequence.begin + chunk.begin;
  Product scores{.data = scratch.scores,
                 .stride = blocks.kScoreStride,
                 .rows = rows,
                 .columns = chunk.count(),
                 .inner = width};
  sgemm(scores, {scratch.q, width, false}, transposed(pass.k.matrix(token, work.kv_head)));
  scores.data = scratch.dscores;
  sgemm(scores, {scratch.dout, width, false}, transposed(pass.v.matrix(token, work.kv_head)));
  for (int64_t row = 0; row < rows; ++row) {
    float* p = scratch.scores + row * blocks.kScoreStride;
    float* dp = scratch.dscores + row * blocks.kScoreStride;
    const int64_t query = block.begin + row % block.count;
    const Range inside = visible_keys(blocks, query, chunk);
    zero_outside(p, inside, chunk.count());
    zero_outside(dp, inside, chunk.count());
    row_score_gradients(p + inside.begin, dp + inside.begin, inside.count(), scratch.lse[row],
                        scratch.delta[row]);
    // The softmax of one score is constant. What dp - delta leaves there is rounding, which an optimiser that
    // divides by the gradient's size would take for a direction.
    if (blocks.first_key(query) == query) std::fill_n(dp + inside.begin, inside.count(), 0.0f);
  }
}

void backward_block(const BackwardPass& pass, const Work& work, int64_t part,
                    const BackwardScratch& scratch) {
  const AttentionBlocks& blocks = pass.blocks;
  const int64_t width = blocks.shape.head_dim;
  const int64_t rows = blocks.group * work.block.count;
  gather_block(pass, work, scratch);
  bool first = true;
  for_each_chunk(blocks, work.block, [&](Range chunk) {
    const int64_t token = work.block.sequence.begin + chunk.begin;
    chunk_score_gradients(pass, work, chunk, scratch);
    const KeyGradients sums = pass.key_gradients(part, token, work.kv_head);
    const Matrix p{scratch.scores, blocks.kScoreStride, false};
    const Matrix dscores{scratch.dscores, blocks.kScoreStride, false};
    Product sum{.data = sums.dv,
                .stride = sums.dv_stride,
                .rows = chunk.count(),
                .columns = width,
                .inner = rows,
                .accumulate = true};
    sgemm(sum, transposed(p), {scratch.dout, width, false});
    sum.data = sums.dk;
    sum.stride = sums.dk_stride;
    sgemm(sum, transposed(dscores), {scratch.q, width, false});
    sgemm({.data = scratch.dq,
           .stride = width,
           .rows = rows,
           .columns = width,
           .inner = chunk.count(),
           .accumulate = !first},
          dscores, pass.k.matrix(token, work.kv_head));
    first = false;
  });
  for_each_row(blocks, work, [&](int64_t row, int64_t token, int64_t head) {
    row_scaled(pass.dq.at(token, head), scratch.dq + row * width, width, blocks.scale);
  });
}

// Every parts-th query block of a sequence, from block `part`: parts of nearly the same work.
void backward_part(const BackwardPass& pass, const Sequence& sequence, int64_t kv_head, int64_t part,
                   const BackwardScratch& scratch) {
  const AttentionBlocks& blocks = pass.blocks;
  const KeyGradients sums = pass.key_gradients(part, sequence.begin, kv_head);
  for (int64_t key = 0; key < sequence.length(); ++key) {
    std::fill_n(sums.dk + key * sums.dk_stride, blocks.shape.head_dim, 0.0f);
    std::fill_n(sums.dv + key * sums.dv_stride, blocks.shape.head_dim, 0.0f);
  }
  for (int64_t begin = part * blocks.tokens; begin < sequence.length(); begin += pass.parts * blocks.tokens) {
    const int64_t count = std::min(blocks.tokens, sequence.length() - begin);
    backward_block(pass, {{sequence, begin, count}, kv_head}, part, scratch);
  }
}

BIOMOE_ROW_KERNEL void row_add(float* y, const float* x, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[i] += x[i];
}

void add_parts(const Context& ctx, const BackwardPass& pass) {
  if (pass.parts == 1) return;
  parallel_ranges(ctx, pass.tokens, 64, [&](Range tokens) {
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      for (int64_t part = 1; part < pass.parts; ++part) {
        const KeyGradients sums = pass.key_gradients(part, token, 0);
        row_add(pass.dk.at(token, 0), sums.dk, pass.part_width());
        row_add(pass.dv.at(token, 0), sums.dv, pass.part_width());
      }
    }
  });
}

// One Scratch for each thread, in a row.
template <typename Scratch>
Scratch* scratch_per_thread(const Context& ctx, const AttentionBlocks& blocks) {
  const auto threads = static_cast<size_t>(std::max(1, ctx.num_threads));
  static_assert(sizeof(Scratch) <= kArenaAlignment);  // as attention_scratch_bytes counts it
  auto* all = static_cast<Scratch*>(ctx.scratch->allocate(threads * sizeof(Scratch)));
  for (size_t thread = 0; thread < threads; ++thread) new (all + thread) Scratch(*ctx.scratch, blocks);
  return all;
}

}  // namespace

void attention_forward(Context& ctx, const AttentionForwardArgs& args) {
  const AttentionShape& shape = args.shape;
  const ForwardPass pass{.blocks = AttentionBlocks(shape),
                         .q = Heads(args.q_TC, shape),
                         .k = Heads(args.k_TC, shape),
                         .v = Heads(args.v_TC, shape),
                         .out = Heads(args.out_TC, shape),
                         .lse = args.lse_HT.f32(),
                         .lse_stride = args.lse_HT.row_stride,
                         .first_query = 0};
  const ArenaScope scope(*ctx.scratch);
  const auto sequences = list_sequences(*ctx.scratch, shape, args.cu_seqlens_B1, args.q_TC.shape[0]);
  const auto query_blocks = list_query_blocks(*ctx.scratch, pass.blocks, sequences);
  const auto* scratch = scratch_per_thread<ForwardScratch>(ctx, pass.blocks);
  const int64_t kv_heads = shape.num_key_value_heads;
  parallel_items(ctx, static_cast<int64_t>(query_blocks.size()) * kv_heads, [&](int64_t item, int thread) {
    const Work work{query_blocks[static_cast<size_t>(item / kv_heads)], item % kv_heads};
    forward_block(pass, work, scratch[thread]);
  });
}

void attention_backward(Context& ctx, const AttentionBackwardArgs& args) {
  const AttentionShape& shape = args.shape;
  const int64_t tokens = args.q_TC.shape[0];
  const ArenaScope scope(*ctx.scratch);
  const auto sequences = list_sequences(*ctx.scratch, shape, args.cu_seqlens_B1, tokens);
  BackwardPass pass{.blocks = AttentionBlocks(shape),
                    .q = Heads(args.q_TC, shape),
                    .k = Heads(args.k_TC, shape),
                    .v = Heads(args.v_TC, shape),
                    .out = Heads(args.out_TC, shape),
                    .dout = Heads(args.dout_TC, shape),
                    .dq = Heads(args.dq_TC, shape),
                    .dk = Heads(args.dk_TC, shape),
                    .dv = Heads(args.dv_TC, shape),
                    .lse = args.lse_HT.f32(),
                    .lse_stride = args.lse_HT.row_stride,
                    .tokens = tokens,
                    .parts = 1,
                    .dk_parts = nullptr,
                    .dv_parts = nullptr};
  pass.parts = backward_parts(pass.blocks, static_cast<int64_t>(sequences.size()));
  pass.dk_parts = allocate_floats(*ctx.scratch, (pass.parts - 1) * tokens * pass.part_width());
  pass.dv_parts = allocate_floats(*ctx.scratch, (pass.parts - 1) * tokens * pass.part_width());
  const auto* scratch = scratch_per_thread<BackwardScratch>(ctx, pass.blocks);
  const int64_t kv_heads = shape.num_key_value_heads;
  const int64_t items = static_cast<int64_t>(sequences.size()) * kv_heads * pass.parts;
  parallel_items(ctx, items, [&](int64_t item, int thread) {
    const int64_t part = item % pass.parts;
    const int64_t kv_head = item / pass.parts % kv_heads;
    const Sequence& sequence = sequences[static_cast<size_t>(item / pass.parts / kv_heads)];
    backward_part(pass, sequence, kv_head, part, scratch[thread]);
  });
  add_parts(ctx, pass);
}

void attention_decode(Context& ctx, const AttentionDecodeArgs& args) {
  const AttentionShape& shape = args.shape;
  const int64_t keys = args.k_PC.shape[0], queries = args.q_TC.shape[0];
  const ForwardPass pass{.blocks = AttentionBlocks(shape),
                         .q = Heads(args.q_TC, shape),
                         .k = Heads(args.k_PC, shape),
                         .v = Heads(args.v_PC, shape),
                         .out = Heads(args.out_TC, shape),
                         .lse = nullptr,
                         .lse_stride = 0,
                         .first_query = keys - queries};
  const ArenaScope scope(*ctx.scratch);
  const auto* scratch = scratch_per_thread<ForwardScratch>(ctx, pass.blocks);
  const int64_t kv_heads = shape.num_key_value_heads;
  const int64_t query_blocks = ceil_div(queries, pass.blocks.tokens);
  parallel_items(ctx, query_blocks * kv_heads, [&](int64_t item, int thread) {
    // Those with most keys first.
    const int64_t begin = (query_blocks - 1 - item / kv_heads) * pass.blocks.tokens;
    const QueryBlock block{
        {0, keys}, pass.first_query + begin, std::min(pass.blocks.tokens, queries - begin)};
    forward_block(pass, {block, item % kv_heads}, scratch[thread]);
  });
}

}  // namespace biomoe::cpu
