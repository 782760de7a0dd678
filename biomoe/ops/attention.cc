#include "biomoe/ops/attention.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

void check_shape(const char* op, const Context& ctx, const AttentionShape& shape) {
  BM_CHECK(shape.num_heads > 0 && shape.num_key_value_heads > 0 && shape.head_dim > 0 &&
               shape.num_heads % shape.num_key_value_heads == 0,
           "{}: {} heads, {} key/value heads of width {}", op, shape.num_heads, shape.num_key_value_heads,
           shape.head_dim);
  BM_CHECK(!shape.window || *shape.window > 0, "{}: the window is {}, expected 1 or more", op, *shape.window);
  BM_CHECK(ctx.scratch != nullptr, "{}: needs scratch memory", op);
}

void check_bands(const char* op, Device device, const AttentionShape& shape, const TensorView& q,
                 const TensorView& k, const TensorView& v) {
  check_rank(op, "q", q, 2);
  check_compute_type(op, "q", q, device);
  const int64_t tokens = q.shape[0];
  const Shape keys{tokens, shape.num_key_value_heads * shape.head_dim};
  check_tensor(op, "q", q, q.dtype, Shape{tokens, shape.num_heads * shape.head_dim}, Layout::kRows);
  check_tensor(op, "k", k, q.dtype, keys, Layout::kRows);
  check_tensor(op, "v", v, q.dtype, keys, Layout::kRows);
}

void check_sequences(const char* op, const TensorView& cu_seqlens) {
  check_rank(op, "cu_seqlens", cu_seqlens, 1);
  check_tensor(op, "cu_seqlens", cu_seqlens, DType::kI32, cu_seqlens.shape);
  BM_CHECK(cu_seqlens.shape[0] > 0, "{}: cu_seqlens is empty, expected its leading 0", op);
}

}  // namespace

void attention_forward(Context& ctx, const AttentionForwardArgs& args) {
  constexpr const char* kOp = "attention_forward";
  check_shape(kOp, ctx, args.shape);
  check_bands(kOp, ctx.device, args.shape, args.q_TC, args.k_TC, args.v_TC);
  check_sequences(kOp, args.cu_seqlens_B1);
  check_tensor(kOp, "out", args.out_TC, args.q_TC.dtype, args.q_TC.shape, Layout::kRows);
  check_tensor(kOp, "lse", args.lse_HT, DType::kF32, Shape{args.shape.num_heads, args.q_TC.shape[0]});
  BIOMOE_RUN_ON_DEVICE(attention_forward, ctx, args);
}

void attention_backward(Context& ctx, const AttentionBackwardArgs& args) {
  constexpr const char* kOp = "attention_backward";
  check_shape(kOp, ctx, args.shape);
  check_bands(kOp, ctx.device, args.shape, args.q_TC, args.k_TC, args.v_TC);
  check_bands(kOp, ctx.device, args.shape, args.dq_TC, args.dk_TC, args.dv_TC);
  check_sequences(kOp, args.cu_seqlens_B1);
  const Shape& queries = args.q_TC.shape;
  check_tensor(kOp, "out", args.out_TC, args.q_TC.dtype, queries, Layout::kRows);
  check_tensor(kOp, "dout", args.dout_TC, args.q_TC.dtype, queries, Layout::kRows);
  check_tensor(kOp, "dq", args.dq_TC, args.q_TC.dtype, queries, Layout::kRows);
  check_tensor(kOp, "lse", args.lse_HT, DType::kF32, Shape{args.shape.num_heads, queries[0]});
  BIOMOE_RUN_ON_DEVICE(attention_backward, ctx, args);
}

void attention_decode(Context& ctx, const AttentionDecodeArgs& args) {
  constexpr const char* kOp = "attention_decode";
  const AttentionShape& shape = args.shape;
  check_shape(kOp, ctx, shape);
  check_rank(kOp, "q", args.q_TC, 2);
  check_rank(kOp, "k", args.k_PC, 2);
  const Shape queries{args.q_TC.shape[0], shape.num_heads * shape.head_dim};
  const Shape keys{args.k_PC.shape[0], shape.num_key_value_heads * shape.head_dim};
  check_compute_type(kOp, "q", args.q_TC, ctx.device);
  check_tensor(kOp, "q", args.q_TC, args.q_TC.dtype, queries, Layout::kRows);
  check_tensor(kOp, "k", args.k_PC, args.q_TC.dtype, keys, Layout::kRows);
  check_tensor(kOp, "v", args.v_PC, args.q_TC.dtype, keys, Layout::kRows);
  check_tensor(kOp, "out", args.out_TC, args.q_TC.dtype, queries, Layout::kRows);
  BM_CHECK(queries[0] <= keys[0] && keys[0] <= shape.max_seqlen,
           "{}: {} queries at the end of {} keys, expected at most {} keys", kOp, queries[0], keys[0],
           shape.max_seqlen);
  BIOMOE_RUN_ON_DEVICE(attention_decode, ctx, args);
}

size_t attention_scratch_bytes(Device device, const AttentionShape& shape, int64_t tokens, int num_threads,
                               bool deterministic) {
  return device == Device::kCpu ? cpu::attention_scratch_bytes(shape, tokens, num_threads)
                                : cuda::attention_scratch_bytes(shape, tokens, deterministic);
}

}  // namespace biomoe
