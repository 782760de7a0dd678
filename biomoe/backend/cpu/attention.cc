// Blocked attention with the softmax kept as a running maximum and sum (Milakov and Gimelshein, 2018; Dao et
// al., "FlashAttention", 2022); backward recomputes the probabilities from lse.
#include "biomoe/ops/attention.h"

#include <array>
#include <limits>
#include <new>

#include "biomoe/backend/cpu/attention_blocks.h"
#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/sgemm.h"
#include "biomoe/backend/cpu/transpose.h"
#include "biomoe/backend/cpu/vector_math.h"

namespace biomoe::cpu {
namespace {

float* allocate_floats(Arena& arena, int64_t count) {
  return static_cast<float*>(arena.allocate(static_cast<size_t>(count) * sizeof(float)));
}

// The rows below are keys, or elements of a head; their columns are queries. Loops run along columns.

// maximum[c] = max over rows, and what it was. A NaN is passed over.
BIOMOE_ROW_KERNEL void column_maxima(float* maximum, const float* x, int64_t stride, int64_t rows,
                                     int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * stride;
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) maximum[c] = from[c] > maximum[c] ? from[c] : maximum[c];
  }
}

// x = exp(x - shift[c]), and sum[c] += the sum over rows.
BIOMOE_ROW_KERNEL void column_exponentials(float* x, int64_t stride, int64_t rows, int64_t columns,
                                           const float* shift, float* sum) {
  for (int64_t row = 0; row < rows; ++row) {
    float* line = x + row * stride;
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) {
      line[c] = exp_f32(line[c] - shift[c]);
      sum[c] += line[c];
    }
  }
}

// maximum is brought from `before` to the new one: factor = exp(before - maximum), sum *= factor. Where no
// key was seen yet both are -inf.
BIOMOE_ROW_KERNEL void rescale(const float* before, const float* maximum, float* shift, float* factor,
                               float* sum, int64_t columns) {
#pragma omp simd
  for (int64_t c = 0; c < columns; ++c) {
    shift[c] = maximum[c] == -std::numeric_limits<float>::infinity() ? 0.0f : maximum[c];
    factor[c] = exp_f32(before[c] - shift[c]);
    sum[c] *= factor[c];
  }
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
BIOMOE_ROW_KERNEL void score_gradients(float* scores, float* dp, int64_t stride, int64_t rows,
                                       int64_t columns, const float* lse, const float* delta) {
  for (int64_t row = 0; row < rows; ++row) {
    float* p = scores + row * stride;
    float* gradient = dp + row * stride;
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) {
      p[c] = exp_f32(p[c] - lse[c]);
      gradient[c] = p[c] * (gradient[c] - delta[c]);
    }
  }
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

// A query block together with the key/value head that its group of query heads reads.
struct Work {
  QueryBlock block;
  int64_t kv_head = 0;
};

// The rows of a band that belong to the columns of a block: at(c) is the head of column c.
struct ColumnHeads {
  ColumnHeads(const AttentionBlocks& blocks, const Work& work, const Heads& band, int64_t first_token)
      : group(blocks.group),
        head(work.kv_head * blocks.group),
        token(work.block.sequence.begin + work.block.begin - first_token),
        heads(band) {}
  float* at(int64_t column) const { return heads.at(token + column / group, head + column % group); }
  int64_t group, head, token;
  const Heads& heads;
};

// Heads of neighbouring tokens lie too far apart, and end too soon, for hardware to foresee them.
constexpr int64_t kHeadsAhead = 4;
void prefetch_head(const ColumnHeads& heads, int64_t column) {
  constexpr int64_t kLineElements = 16;
  const float* head = heads.at(column);
  for (int64_t x = 0; x < heads.heads.width; x += kLineElements) __builtin_prefetch(head + x);
}

// rows[c * stride + x] = factor * element x of head c, for c < count.
void copy_rows(const ColumnHeads& heads, int64_t count, float factor, float* rows, int64_t stride) {
  for (int64_t c = 0; c < count; ++c) {
    prefetch_head(heads, std::min(c + kHeadsAhead, count - 1));
    row_scaled(rows + c * stride, heads.at(c), heads.heads.width, factor);
  }
}

// Head c = factor[c] * row c.
void store_rows(const ColumnHeads& heads, int64_t count, const float* factor, const float* rows,
                int64_t stride) {
  for (int64_t c = 0; c < count; ++c) {
    row_scaled(heads.at(c), rows + c * stride, heads.heads.width, factor[c]);
  }
}

// columns[x * stride + c] = element x of row c, for x < elements and c < count; zero from there to `width`.
void transpose_rows(const float* rows, int64_t row_stride, int64_t count, int64_t elements, int64_t width,
                    float* columns, int64_t stride) {
  int64_t c = 0;
  for (; c + 4 <= count; c += 4) {
    const float* from = rows + c * row_stride;
    int64_t x = 0;
    for (; x + 4 <= elements; x += 4) {
      const auto quads =
          transposed({load_quad(from + x), load_quad(from + row_stride + x),
                      load_quad(from + 2 * row_stride + x), load_quad(from + 3 * row_stride + x)});
      for (int64_t j = 0; j < 4; ++j) {
        store_quad(columns + (x + j) * stride + c, quads[static_cast<size_t>(j)]);
      }
    }
    for (; x < elements; ++x) {
      for (int64_t j = 0; j < 4; ++j) columns[x * stride + c + j] = from[j * row_stride + x];
    }
  }
  for (; c < count; ++c) {
    for (int64_t x = 0; x < elements; ++x) columns[x * stride + c] = rows[c * row_stride + x];
  }
  if (count == width) return;
  for (int64_t x = 0; x < elements; ++x) {
    std::fill(columns + x * stride + count, columns + x * stride + width, 0.0f);
  }
}

// A chunk of keys, counted from the start of the sequence, and the columns that see some of them, in whole
// blocks of the products' kernel.
struct Chunk {
  Range keys;
  Range columns;
};

// rows += transposed(weights) heads, for the columns of a chunk below `count`: weights are keys x columns,
// heads one for each key, rows [column][element of a head]. Heads are copied where the kernel would read past
// the end of the last one, and where the distance of tokens puts all of them into few cache sets, unless they
// are read but once.
void add_weighted_heads(const AttentionBlocks& blocks, const Chunk& chunk, int64_t count,
                        const float* weights, Matrix heads, float* copy, float* rows) {
  constexpr int64_t kSetDistance = 1024;  // elements; of lines in one set of a level 1 cache
  const int64_t width = blocks.shape.head_dim, first = chunk.columns.begin;
  const bool few_sets = heads.stride % kSetDistance == 0 && chunk.columns.count() > kSgemmColumns;
  if (width % kSgemmColumns != 0 || few_sets) {
    for (int64_t key = 0; key < chunk.keys.count(); ++key) {
      std::copy_n(heads.data + key * heads.stride, width, copy + key * blocks.head_stride());
    }
    heads = {copy, blocks.head_stride(), false};
  }
  sgemm_in_place({.data = rows + first * blocks.head_stride(),
                  .stride = blocks.head_stride(),
                  .rows = std::min(chunk.columns.end, count) - first,
                  .columns = width,
                  .inner = chunk.keys.count(),
                  .accumulate = true},
                 {weights + first, blocks.stride(), true}, heads.data, heads.stride);
}

// visit(Chunk) for each chunk of the keys that the block sees.
template <typename Visit>
void for_each_chunk(const AttentionBlocks& blocks, const QueryBlock& block, const Visit& visit) {
  const int64_t end = block.begin + block.count;
  for (int64_t key = blocks.first_key(block.begin); key < end; key += blocks.kKeys) {
    const Range keys{key, std::min(key + blocks.kKeys, end)};
    const Range queries = seeing_queries(blocks, block, keys);
    visit(Chunk{keys,
                {queries.begin * blocks.group / kSgemmColumns * kSgemmColumns,
                 blocks.round_up(queries.end * blocks.group)}});
  }
}

// x = `value` where a query of the chunk's columns does not see the key of the row.
void fill_unseen(const AttentionBlocks& blocks, const QueryBlock& block, const Chunk& chunk, float value,
                 float* x) {
  for (int64_t row = 0; row < chunk.keys.count(); ++row) {
    const int64_t key = chunk.keys.begin + row;
    const Range queries = seeing_queries(blocks, block, {key, key + 1});
    const int64_t begin = std::max(chunk.columns.begin, queries.begin * blocks.group);
    const int64_t end = std::min(chunk.columns.end, queries.end * blocks.group);
    float* line = x + row * blocks.stride();
    std::fill(line + chunk.columns.begin, line + begin, value);
    std::fill(line + std::max(begin, end), line + chunk.columns.end, value);
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
      : q(allocate_floats(arena, blocks.shape.head_dim * blocks.stride())),
        rows(allocate_floats(arena, blocks.max_columns() * blocks.head_stride())),
        scores(allocate_floats(arena, blocks.kKeys * blocks.stride())),
        heads(allocate_floats(arena, blocks.kKeys * blocks.head_stride())),
        maximum(allocate_floats(arena, blocks.stride())),
        sum(allocate_floats(arena, blocks.stride())),
        before(allocate_floats(arena, blocks.stride())),
        shift(allocate_floats(arena, blocks.stride())) {}
  // q: elements of a head x columns; rows, of q and then of out: columns x elements of a head; scores: keys x
  // columns; heads: of the values of a chunk; the others one for each column.
  float *q, *rows, *scores, *heads, *maximum, *sum, *before, *shift;
};

// Turns the scores of one chunk into exp(score - running maximum), and brings the sums and outputs of the
// chunks before it to that maximum.
void softmax_chunk(const AttentionBlocks& blocks, const QueryBlock& block, const Chunk& chunk,
                   const ForwardScratch& scratch) {
  const int64_t stride = blocks.stride(), first = chunk.columns.begin, columns = chunk.columns.count();
  float* scores = scratch.scores + first;
  float *maximum = scratch.maximum + first, *before = scratch.before + first, *shift = scratch.shift + first;
  float* sum = scratch.sum + first;
  fill_unseen(blocks, block, chunk, -std::numeric_limits<float>::infinity(), scratch.scores);
  std::copy_n(maximum, columns, before);
  column_maxima(maximum, scores, stride, chunk.keys.count(), columns);
  rescale(before, maximum, shift, before, sum, columns);
  for (int64_t c = 0; c < columns; ++c) {
    float* row = scratch.rows + (first + c) * blocks.head_stride();
    row_scaled(row, row, blocks.shape.head_dim, before[c]);
  }
  column_exponentials(scores, stride, chunk.keys.count(), columns, shift, sum);
}

void forward_block(const ForwardPass& pass, const Work& work, const ForwardScratch& scratch) {
  const AttentionBlocks& blocks = pass.blocks;
  const int64_t width = blocks.shape.head_dim, stride = blocks.stride();
  const int64_t count = blocks.group * work.block.count, columns = blocks.round_up(count);
  const int64_t first_token = work.block.sequence.begin;
  const int64_t row_stride = blocks.head_stride();
  copy_rows({blocks, work, pass.q, pass.first_query}, count, blocks.scale, scratch.rows, row_stride);
  transpose_rows(scratch.rows, row_stride, count, width, columns, scratch.q, stride);
  std::fill_n(scratch.rows, columns * row_stride, 0.0f);
  std::fill_n(scratch.sum, columns, 0.0f);
  std::fill_n(scratch.maximum, columns, -std::numeric_limits<float>::infinity());
  for_each_chunk(blocks, work.block, [&](const Chunk& chunk) {
    const int64_t token = first_token + chunk.keys.begin, first = chunk.columns.begin;
    sgemm_in_place({.data = scratch.scores + first,
                    .stride = stride,
                    .rows = chunk.keys.count(),
                    .columns = chunk.columns.count(),
                    .inner = width},
                   pass.k.matrix(token, work.kv_head), scratch.q + first, stride);
    softmax_chunk(blocks, work.block, chunk, scratch);
    add_weighted_heads(blocks, chunk, count, scratch.scores, pass.v.matrix(token, work.kv_head),
                       scratch.heads, scratch.rows);
  });
  for (int64_t c = 0; c < count; ++c) {
    const int64_t head = work.kv_head * blocks.group + c % blocks.group;
    const int64_t token = first_token + work.block.begin + c / blocks.group;
    if (pass.lse) pass.lse[head * pass.lse_stride + token] = scratch.maximum[c] + std::log(scratch.sum[c]);
    scratch.sum[c] = 1.0f / scratch.sum[c];
  }
  store_rows({blocks, work, pass.out, pass.first_query}, count, scratch.sum, scratch.rows, row_stride);
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
      : q(allocate_floats(arena, blocks.shape.head_dim * blocks.stride())),
        dout(allocate_floats(arena, blocks.shape.head_dim * blocks.stride())),
        dq_rows(allocate_floats(arena, blocks.max_columns() * blocks.head_stride())),
        q_rows(allocate_floats(arena, blocks.max_columns() * blocks.head_stride())),
        dout_rows(allocate_floats(arena, blocks.max_columns() * blocks.head_stride())),
        scores(allocate_floats(arena, blocks.kKeys * blocks.stride())),
        heads(allocate_floats(arena, blocks.kKeys * blocks.head_stride())),
        dscores(allocate_floats(arena, blocks.kKeys * blocks.stride())),
        lse(allocate_floats(arena, blocks.stride())),
        delta(allocate_floats(arena, blocks.stride())) {}
  // q and dout: elements of a head x columns; dq_rows, q_rows and dout_rows: columns x elements of a head;
  // scores: keys x columns; heads: of the keys of a chunk; lse and delta: one for each column.
  float *q, *dout, *dq_rows, *q_rows, *dout_rows, *scores, *heads, *dscores, *lse, *delta;
};

void gather_block(const BackwardPass& pass, const Work& work, const BackwardScratch& scratch) {
  const AttentionBlocks& blocks = pass.blocks;
  const int64_t width = blocks.shape.head_dim, stride = blocks.stride(), row_stride = blocks.head_stride();
  const int64_t count = blocks.group * work.block.count, columns = blocks.round_up(count);
  const ColumnHeads q(blocks, work, pass.q, 0), dout(blocks, work, pass.dout, 0),
      out(blocks, work, pass.out, 0);
  copy_rows(q, count, blocks.scale, scratch.q_rows, row_stride);
  copy_rows(dout, count, 1.0f, scratch.dout_rows, row_stride);
  transpose_rows(scratch.q_rows, row_stride, count, width, columns, scratch.q, stride);
  transpose_rows(scratch.dout_rows, row_stride, count, width, columns, scratch.dout, stride);
  for (int64_t c = 0; c < count; ++c) {
    const int64_t head = work.kv_head * blocks.group + c % blocks.group;
    const int64_t token = work.block.sequence.begin + work.block.begin + c / blocks.group;
    prefetch_head(out, std::min(c + kHeadsAhead, count - 1));
    scratch.lse[c] = pass.lse[head * pass.lse_stride + token];
    scratch.delta[c] = row_dot(scratch.dout_rows + c * row_stride, out.at(c), width);
  }
  std::fill(scratch.lse + count, scratch.lse + columns, 0.0f);
  std::fill(scratch.delta + count, scratch.delta + columns, 0.0f);
}

// Probabilities and gradients of the scores of one chunk.
void chunk_score_gradients(const BackwardPass& pass, const Work& work, const Chunk& chunk,
                           const BackwardScratch& scratch) {
  const AttentionBlocks& blocks = pass.blocks;
  const QueryBlock& block = work.block;
  const int64_t stride = blocks.stride(), first = chunk.columns.begin;
  const int64_t token = block.sequence.begin + chunk.keys.begin;
  Product scores{.data = scratch.scores + first,
                 .stride = stride,
                 .rows = chunk.keys.count(),
                 .columns = chunk.columns.count(),
                 .inner = blocks.shape.head_dim};
  sgemm_in_place(scores, pass.k.matrix(token, work.kv_head), scratch.q + first, stride);
  scores.data = scratch.dscores + first;
  sgemm_in_place(scores, pass.v.matrix(token, work.kv_head), scratch.dout + first, stride);
  score_gradients(scratch.scores + first, scratch.dscores + first, stride, chunk.keys.count(),
                  chunk.columns.count(), scratch.lse + first, scratch.delta + first);
  fill_unseen(blocks, block, chunk, 0.0f, scratch.scores);
  fill_unseen(blocks, block, chunk, 0.0f, scratch.dscores);
  // The softmax of one score is constant. What dp - delta leaves there is rounding, which an optimiser that
  // divides by the gradient's size would take for a direction.
  for (int64_t i = 0; i < block.count; ++i) {
    if (blocks.first_key(block.begin + i) < block.begin + i) continue;
    for (int64_t row = 0; row < chunk.keys.count(); ++row) {
      std::fill_n(scratch.dscores + row * stride + i * blocks.group, blocks.group, 0.0f);
    }
  }
}

void backward_block(const BackwardPass& pass, const Work& work, int64_t part,
                    const BackwardScratch& scratch) {
  const AttentionBlocks& blocks = pass.blocks;
  const int64_t width = blocks.shape.head_dim, stride = blocks.stride();
  const int64_t count = blocks.group * work.block.count;
  gather_block(pass, work, scratch);
  std::fill_n(scratch.dq_rows, count * blocks.head_stride(), 0.0f);
  for_each_chunk(blocks, work.block, [&](const Chunk& chunk) {
    const int64_t token = work.block.sequence.begin + chunk.keys.begin, first = chunk.columns.begin;
    chunk_score_gradients(pass, work, chunk, scratch);
    const KeyGradients sums = pass.key_gradients(part, token, work.kv_head);
    Product sum{.data = sums.dv,
                .stride = sums.dv_stride,
                .rows = chunk.keys.count(),
                .columns = width,
                .inner = std::min(chunk.columns.end, count) - first,
                .accumulate = true};
    sgemm_in_place(sum, {scratch.scores + first, stride, false},
                   scratch.dout_rows + first * blocks.head_stride(), blocks.head_stride());
    sum.data = sums.dk;
    sum.stride = sums.dk_stride;
    sgemm_in_place(sum, {scratch.dscores + first, stride, false},
                   scratch.q_rows + first * blocks.head_stride(), blocks.head_stride());
    add_weighted_heads(blocks, chunk, count, scratch.dscores, pass.k.matrix(token, work.kv_head),
                       scratch.heads, scratch.dq_rows);
  });
  const ColumnHeads dq(blocks, work, pass.dq, 0);
  for (int64_t c = 0; c < count; ++c) {
    row_scaled(dq.at(c), scratch.dq_rows + c * blocks.head_stride(), width, blocks.scale);
  }
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
