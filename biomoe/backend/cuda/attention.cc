#include "biomoe/ops/attention.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "biomoe/backend/cuda/attention_graph.h"
#include "biomoe/backend/cuda/attention_rows.h"
#include "biomoe/backend/cuda/attention_tiles.h"
#include "biomoe/backend/cuda/state.h"
#include "biomoe/core/error.h"
#include "biomoe/ops/attention_calls.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {
namespace {

// Of other GPUs than 9.x and 10.x, cuDNN neither takes log sum exps by token nor has a fixed order of sums.
bool in_tiles(const Context& ctx) {
  const int generation = ctx.state->compute_capability / 10;
  return ctx.portable_kernels || (generation != 9 && generation != 10);
}

// From element 2^31 of these on cuDNN's backward gives wrong gradients of queries and keys (9.1x, H200).
bool beyond_cudnn(const AttentionBackwardArgs& args) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  return args.q_TC.shape[0] * std::max(args.out_TC.row_stride, args.dout_TC.row_stride) > kLimit;
}

void check_supported(const AttentionShape& shape, const TensorView& q, int64_t widest) {
  if (q.dtype != DType::kBF16) {
    throw user_error("attention on the GPU computes in BF16, not {}; set device=cpu or a bf16 recipe",
                     dtype_name(q.dtype));
  }
  if (shape.head_dim % kHeadWidthStep != 0 || shape.head_dim > widest) {
    throw user_error(
        "attention on this GPU takes heads of a width that is a multiple of {} up to {}, not {}; change "
        "head_dim, or set device=cpu",
        kHeadWidthStep, widest, shape.head_dim);
  }
}

int64_t widest_of_cudnn(const Context& ctx) {
  return ctx.state->compute_capability / 10 == 9 ? kWidestHead : kWidestTrainedElsewhere;
}

// Only Hopper's kernels for sums in a fixed order keep the score gradients in memory.
bool cut_to_memory(const Context& ctx, bool backward) {
  return backward && ctx.deterministic && ctx.state->compute_capability / 10 == 9;
}

// One operation: its operands, the lists of its sequences and the plan that serves all its calls.
class Operation {
 public:
  Operation(Context& ctx, const AttentionShape& shape, const TensorView& cu_seqlens, int64_t tokens,
            bool backward)
      : ctx_(ctx),
        shape_(shape),
        cu_seqlens_(cu_seqlens.i32()),
        sequences_(cu_seqlens.shape[0] - 1),
        calls_(attention_calls(shape, sequences_, tokens, cut_to_memory(ctx, backward))),
        lists_(calls_) {
    constexpr int64_t kMaxCalls = 65535;  // blocks along y of the kernel that makes the lists
    BM_CHECK(calls_.count <= kMaxCalls, "attention: {} calls for {} sequences, at most {}", calls_.count,
             sequences_, kMaxCalls);
    key_.backward = backward;
    key_.deterministic = backward && ctx.deterministic;
    key_.sequences = calls_.sequences;
    key_.max_seqlen = calls_.max_seqlen;
    key_.max_tokens = backward ? calls_.max_tokens : 0;
    key_.key_value_heads = calls_.key_value_heads;
    key_.heads = calls_.key_value_heads * group();
    key_.head_dim = shape.head_dim;
    // A window that nothing is outside of needs no mask.
    key_.window = shape.window.value_or(0) < calls_.max_seqlen ? shape.window.value_or(0) : 0;
  }

  // `heads` side by side in a row, each of `width` elements. A matrix of one row may have any stride.
  void set(AttentionOperand operand, void* data, int64_t row_stride, int64_t heads, int64_t width) {
    data_[operand] = static_cast<uint8_t*>(data);
    key_.strides[operand] = std::max(row_stride, heads * width);
    head_bytes_[operand] = static_cast<size_t>(width) * (operand == kAttentionLse ? 4 : 2);
  }
  void set_queries(AttentionOperand operand, const TensorView& view) {
    set(operand, view.data, view.row_stride, shape_.num_heads, shape_.head_dim);
  }
  void set_keys(AttentionOperand operand, const TensorView& view) {
    set(operand, view.data, view.row_stride, shape_.num_key_value_heads, shape_.head_dim);
  }
  void set_lse(const TensorView& lse) { set(kAttentionLse, lse.data, shape_.num_heads, shape_.num_heads, 1); }

  // Takes scratch memory; the caller's ArenaScope gives it back.
  void run() {
    make_lists();
    DeviceState& state = *ctx_.state;
    if (!state.attention_plans) state.attention_plans = std::make_shared<AttentionPlans>();
    const AttentionGraph& graph = state.attention_plans->find_or_build(key_);
    void* workspace = take_workspace(state.attention_plans->workspace_bytes(graph));
    const int64_t head_groups = shape_.num_key_value_heads / calls_.key_value_heads;
    for (int64_t call = 0; call < calls_.count; ++call) {
      for (int64_t heads = 0; heads < head_groups; ++heads) {
        AttentionBuffers buffers = buffers_of(call, heads * calls_.key_value_heads);
        buffers.workspace = workspace;
        state.attention_plans->run(graph, state.stream, buffers);
      }
    }
  }

 private:
  int64_t group() const { return shape_.num_heads / shape_.num_key_value_heads; }

  void make_lists() {
    AttentionListsArgs args{.cu_seqlens = cu_seqlens_, .sequences = sequences_, .calls = calls_};
    lengths_ = static_cast<int32_t*>(ctx_.scratch->allocate(lists_.lengths_bytes));
    args.lengths = lengths_;
    args.strides = key_.strides;
    for (size_t operand = 0; operand < kAttentionOperands; ++operand) {
      if (key_.strides[operand] == 0) continue;
      offsets_[operand] = static_cast<int64_t*>(ctx_.scratch->allocate(lists_.offsets_bytes));
      args.offsets[operand] = offsets_[operand];
    }
    check(make_attention_lists(ctx_.state->stream, args), "attention_lists_kernel");
  }

  void* take_workspace(size_t bytes) {
    const size_t left = ctx_.scratch->capacity() - ctx_.scratch->used();
    if (align_up(bytes) > left) {
      throw failure(
          "attention: cuDNN asks for {} bytes of workspace and {} are left of those planned ({} sequences of "
          "{} "
          "tokens, {} tokens in all, {} heads of width {}{})",
          bytes, left, key_.sequences, key_.max_seqlen, key_.max_tokens, key_.heads, key_.head_dim,
          key_.deterministic ? ", deterministic" : "");
    }
    return ctx_.scratch->allocate(bytes);
  }

  AttentionBuffers buffers_of(int64_t call, int64_t first_key_value_head) const {
    AttentionBuffers buffers;
    buffers.lengths = lengths_ + static_cast<size_t>(call) * lists_.lengths_stride;
    for (size_t operand = 0; operand < kAttentionOperands; ++operand) {
      if (key_.strides[operand] == 0) continue;
      const bool key_side = operand == kAttentionK || operand == kAttentionV || operand == kAttentionDk ||
                            operand == kAttentionDv;
      const auto head = static_cast<size_t>(first_key_value_head * (key_side ? 1 : group()));
      buffers.data[operand] = data_[operand] + head * head_bytes_[operand];
      buffers.offsets[operand] = offsets_[operand] + static_cast<size_t>(call) * lists_.offsets_stride;
    }
    return buffers;
  }

  Context& ctx_;
  const AttentionShape& shape_;
  const int32_t* cu_seqlens_;
  int64_t sequences_;
  AttentionCalls calls_;
  AttentionLists lists_;
  AttentionGraphKey key_;
  std::array<uint8_t*, kAttentionOperands> data_{};
  std::array<size_t, kAttentionOperands> head_bytes_{};
  int32_t* lengths_ = nullptr;
  std::array<int64_t*, kAttentionOperands> offsets_{};
};

// With grouped heads cuDNN keeps dk and dv of every query head in fp32, in rows H / G times as far apart as
// those of dk and dv. So these are then written side by side, and copied to their bands of a wider matrix.
class KeyGradients {
 public:
  KeyGradients(Context& ctx, const AttentionShape& shape, const TensorView& out)
      : ctx_(ctx),
        out_(out),
        direct_(shape.num_heads == shape.num_key_value_heads || out.shape[0] <= 1 || out.contiguous()),
        side_by_side_(out) {
    if (direct_) return;
    side_by_side_ = TensorView(ctx.scratch->allocate(attention_key_gradient_bytes(shape, out.shape[0])),
                               out.dtype, out.shape);
  }
  const TensorView& view() const { return side_by_side_; }
  void store() const {
    if (direct_) return;
    const size_t element = dtype_size(out_.dtype);
    const size_t row = static_cast<size_t>(out_.shape[1]) * element;
    check(cudaMemcpy2DAsync(out_.data, static_cast<size_t>(out_.row_stride) * element, side_by_side_.data,
                            row, row, static_cast<size_t>(out_.shape[0]), cudaMemcpyDeviceToDevice,
                            ctx_.state->stream),
          "attention: cudaMemcpy2DAsync");
  }

 private:
  Context& ctx_;
  TensorView out_;
  bool direct_;
  TensorView side_by_side_;
};

void clear_rows(const Context& ctx, const TensorView& rows) {
  const size_t element = dtype_size(rows.dtype);
  check(cudaMemset2DAsync(rows.data, static_cast<size_t>(rows.row_stride) * element, 0,
                          static_cast<size_t>(rows.shape[1]) * element, static_cast<size_t>(rows.shape[0]),
                          ctx.state->stream),
        "attention: cudaMemset2DAsync");
}

void clear_single_key_gradients(const Context& ctx, const AttentionBackwardArgs& args) {
  if (args.shape.window == 1) {
    clear_rows(ctx, args.dq_TC);
    clear_rows(ctx, args.dk_TC);
    return;
  }
  check(clear_single_key_rows(ctx.state->stream, {.cu_seqlens = args.cu_seqlens_B1.i32(),
                                                  .sequences = args.cu_seqlens_B1.shape[0] - 1,
                                                  .dq = args.dq_TC.bf16(),
                                                  .dk = args.dk_TC.bf16(),
                                                  .dq_stride = args.dq_TC.row_stride,
                                                  .dk_stride = args.dk_TC.row_stride,
                                                  .dq_width = args.dq_TC.shape[1],
                                                  .dk_width = args.dk_TC.shape[1]}),
        "single_key_rows_kernel");
}

TileRows rows_of(const TensorView& view) {
  return {view.bf16(), view.row_stride};
}

TileShape tile_shape(const AttentionShape& shape, int64_t queries, int64_t keys) {
  return {.queries = queries,
          .keys = keys,
          .heads = shape.num_heads,
          .key_value_heads = shape.num_key_value_heads,
          .head_dim = shape.head_dim,
          .window = shape.window.value_or(0)};
}

TileShape tile_shape(const AttentionShape& shape, const TensorView& cu_seqlens_B1, int64_t tokens) {
  TileShape packed = tile_shape(shape, tokens, tokens);
  packed.cu_seqlens = cu_seqlens_B1.i32();
  packed.sequences = cu_seqlens_B1.shape[0] - 1;
  return packed;
}

void forward_in_tiles(Context& ctx, const AttentionForwardArgs& args) {
  check_supported(args.shape, args.q_TC, kTileForwardWidth);
  const int64_t tokens = args.q_TC.shape[0];
  if (tokens == 0) return;
  check(
      attention_tiles_forward(ctx.state->stream, {.shape = tile_shape(args.shape, args.cu_seqlens_B1, tokens),
                                                  .q = rows_of(args.q_TC),
                                                  .k = rows_of(args.k_TC),
                                                  .v = rows_of(args.v_TC),
                                                  .out = rows_of(args.out_TC),
                                                  .lse = args.lse_HT.f32()}),
      "attention_tiles_forward");
}

void backward_in_tiles(Context& ctx, const AttentionBackwardArgs& args) {
  check_supported(args.shape, args.q_TC, kTileBackwardWidth);
  const int64_t tokens = args.q_TC.shape[0];
  if (tokens == 0) return;
  const ArenaScope scope(*ctx.scratch);
  const TensorView dots = ctx.scratch->tensor(DType::kF32, {tokens, args.shape.num_heads});
  check(attention_tiles_backward(ctx.state->stream,
                                 {.shape = tile_shape(args.shape, args.cu_seqlens_B1, tokens),
                                  .q = rows_of(args.q_TC),
                                  .k = rows_of(args.k_TC),
                                  .v = rows_of(args.v_TC),
                                  .out = rows_of(args.out_TC),
                                  .dout = rows_of(args.dout_TC),
                                  .lse = args.lse_HT.f32(),
                                  .output_dots = dots.f32(),
                                  .dq = rows_of(args.dq_TC),
                                  .dk = rows_of(args.dk_TC),
                                  .dv = rows_of(args.dv_TC)}),
        "attention_tiles_backward");
  clear_single_key_gradients(ctx, args);
}

}  // namespace

void attention_forward(Context& ctx, const AttentionForwardArgs& args) {
  if (in_tiles(ctx)) {
    forward_in_tiles(ctx, args);
    return;
  }
  check_supported(args.shape, args.q_TC, widest_of_cudnn(ctx));
  const int64_t tokens = args.q_TC.shape[0];
  if (tokens == 0) return;
  const ArenaScope scope(*ctx.scratch);
  Operation operation(ctx, args.shape, args.cu_seqlens_B1, tokens, false);
  operation.set_queries(kAttentionQ, args.q_TC);
  operation.set_keys(kAttentionK, args.k_TC);
  operation.set_keys(kAttentionV, args.v_TC);
  operation.set_queries(kAttentionOut, args.out_TC);
  operation.set_lse(args.lse_HT);
  operation.run();
}

void attention_backward(Context& ctx, const AttentionBackwardArgs& args) {
  if (in_tiles(ctx) || beyond_cudnn(args)) {
    backward_in_tiles(ctx, args);
    return;
  }
  check_supported(args.shape, args.q_TC, widest_of_cudnn(ctx));
  const int64_t tokens = args.q_TC.shape[0];
  if (tokens == 0) return;
  const ArenaScope scope(*ctx.scratch);
  const KeyGradients dk(ctx, args.shape, args.dk_TC);
  const KeyGradients dv(ctx, args.shape, args.dv_TC);
  Operation operation(ctx, args.shape, args.cu_seqlens_B1, tokens, true);
  operation.set_queries(kAttentionQ, args.q_TC);
  operation.set_keys(kAttentionK, args.k_TC);
  operation.set_keys(kAttentionV, args.v_TC);
  operation.set_queries(kAttentionOut, args.out_TC);
  operation.set_lse(args.lse_HT);
  operation.set_queries(kAttentionDout, args.dout_TC);
  operation.set_queries(kAttentionDq, args.dq_TC);
  operation.set_keys(kAttentionDk, dk.view());
  operation.set_keys(kAttentionDv, dv.view());
  operation.run();
  dk.store();
  dv.store();
  clear_single_key_gradients(ctx, args);
}

void attention_decode(Context& ctx, const AttentionDecodeArgs& args) {
  check_supported(args.shape, args.q_TC, kTileForwardWidth);
  const int64_t queries = args.q_TC.shape[0];
  if (queries == 0) return;
  check(attention_tiles_forward(ctx.state->stream,
                                {.shape = tile_shape(args.shape, queries, args.k_PC.shape[0]),
                                 .q = rows_of(args.q_TC),
                                 .k = rows_of(args.k_PC),
                                 .v = rows_of(args.v_PC),
                                 .out = rows_of(args.out_TC)}),
        "attention_tiles_forward");
}

}  // namespace biomoe::cuda
