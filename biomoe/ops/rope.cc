#include "biomoe/ops/rope.h"

#include <cmath>

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

float rounded(float value, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return value;
    case DType::kBF16:
      return float_from_bf16(bf16_from_float(value));
    case DType::kF16:
      return float_from_f16(f16_from_float(value));
    default:
      throw failure("fill_rope_tables: no frequencies in {}", dtype_name(dtype));
  }
}

}  // namespace

void rope(Context& ctx, const RopeArgs& args) {
  constexpr const char* kOp = "rope";
  check_rank(kOp, "x", args.x_TC, 2);
  check_rank(kOp, "cos", args.cos_SK2, 2);
  BM_CHECK(args.head_dim >= 0 && args.head_dim % 2 == 0, "{}: head_dim is {}, expected an even number", kOp,
           args.head_dim);
  const int64_t width = args.x_TC.shape[1];
  BM_CHECK(args.num_heads >= 0 && (args.head_dim == 0 || args.num_heads <= width / args.head_dim),
           "{}: {} heads of {} do not fit in rows of {}", kOp, args.num_heads, args.head_dim, width);
  check_compute_type(kOp, "x", args.x_TC, ctx.device);
  check_tensor(kOp, "x", args.x_TC, args.x_TC.dtype, args.x_TC.shape, Layout::kRows);
  check_tensor(kOp, "positions", args.positions_T, DType::kI32, Shape{args.x_TC.shape[0]});
  const Shape table{args.cos_SK2.shape[0], args.head_dim / 2};
  check_tensor(kOp, "cos", args.cos_SK2, DType::kF32, table);
  check_tensor(kOp, "sin", args.sin_SK2, DType::kF32, table);
  BIOMOE_RUN_ON_DEVICE(rope, ctx, args);
}

void fill_rope_tables(double theta, int64_t head_dim, TensorView cos_SK2, TensorView sin_SK2,
                      DType frequency_dtype) {
  constexpr const char* kOp = "fill_rope_tables";
  BM_CHECK(head_dim >= 0 && head_dim % 2 == 0, "{}: head_dim is {}, expected an even number", kOp, head_dim);
  BM_CHECK(theta > 0, "{}: theta is {}, expected more than 0", kOp, theta);
  check_rank(kOp, "cos", cos_SK2, 2);
  const int64_t half = head_dim / 2;
  const Shape table{cos_SK2.shape[0], half};
  check_tensor(kOp, "cos", cos_SK2, DType::kF32, table);
  check_tensor(kOp, "sin", sin_SK2, DType::kF32, table);
  float* cosines = cos_SK2.f32();
  float* sines = sin_SK2.f32();
  for (int64_t i = 0; i < half; ++i) {
    // Every step is rounded to fp32, as the model definition does; the cosine of that angle is then exact to
    // its last place.
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    const float inverse_frequency =
        rounded(1.0f / std::pow(static_cast<float>(theta), exponent), frequency_dtype);
    for (int64_t position = 0; position < table[0]; ++position) {
      const float angle = static_cast<float>(position) * inverse_frequency;
      cosines[position * half + i] = static_cast<float>(std::cos(static_cast<double>(angle)));
      sines[position * half + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }
}

}  // namespace biomoe
