#include <numeric>

#include "biomoe/ops/adamw.h"
#include "biomoe/ops/quantize.h"
#include "tests/cuda/gpu_mx_weights.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/adamw.h"

namespace biomoe::test {
namespace {

// Segments of odd lengths and places with gaps between them, one of them empty, and ones of several blocks.
const std::vector<ArenaSegment> kSegments = {{1, 7, true},         {8, 0, true},       {9, 1, false},
                                             {13, 16, false},      {40, 150003, true}, {150100, 65536, false},
                                             {215640, 16384, true}};
constexpr int64_t kElements = 232100;
constexpr ref::AdamwRule kRule{.lr = 3e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1};
constexpr double kFactor = 0.5;

enum class Masters { kNone, kF32, kRemainder };

struct Variant {
  DType weights;
  Masters masters;
  DType grad, moments;
};

template <typename Body>
void for_each_element(const Body& body) {
  for (const ArenaSegment& segment : kSegments) {
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i)
      body(static_cast<size_t>(i), segment.decay);
  }
}

std::vector<double> inside(const std::vector<double>& values) {
  std::vector<double> all;
  for_each_element([&](size_t i, bool) { all.push_back(values[i]); });
  return all;
}

std::vector<double> update_of(int64_t step, double apply) {
  std::vector<double> update(kNumUpdateValues);
  update[kLr] = kRule.lr;
  update[kCorrection1] = 1.0 - std::pow(kRule.beta1, static_cast<double>(step));
  update[kCorrection2] = 1.0 - std::pow(kRule.beta2, static_cast<double>(step));
  update[kGradScale] = kFactor;
  update[kApply] = apply;
  return update;
}

class CudaAdamwTest : public GpuTest {
 protected:
  void follow(const Variant& v);
};

// State of several steps against the same in double. Where a state is bf16, it is compared in units of the
// type; errors of the steps add up.
void CudaAdamwTest::follow(const Variant& v) {
  const Shape shape{kElements};
  GpuTensor weights(ctx(), v.weights, shape), master(ctx(), DType::kF32, shape),
      remainder(ctx(), DType::kU16, shape);
  GpuTensor grad(ctx(), v.grad, shape), exp_avg(ctx(), v.moments, shape), exp_avg_sq(ctx(), v.moments, shape);
  GpuTensor update(ctx(), DType::kF64, Shape{kNumUpdateValues});
  const bool exact = v.masters != Masters::kNone || v.weights == DType::kF32;
  auto start = normals(1, kElements, exact ? DType::kF32 : DType::kBF16);
  std::vector<double> high, low;
  for (const double value : start) {
    const SplitMaster split = split_master(static_cast<float>(value));
    high.push_back(static_cast<double>(float_from_bf16(split.weight)));
    low.push_back(split.remainder);
  }
  master.set(start);
  weights.set(v.masters == Masters::kRemainder ? high : start);
  remainder.set(low);
  exp_avg.fill(0);
  exp_avg_sq.fill(0);
  std::vector<ref::AdamwState> want(start.size());
  for (size_t i = 0; i < start.size(); ++i) want[i].param = start[i];
  AdamwArgs args{.weights_A = weights.view(),
                 .master_A = v.masters == Masters::kF32 ? master.view() : TensorView(),
                 .remainder_A = v.masters == Masters::kRemainder ? remainder.view() : TensorView(),
                 .grad_A = grad.view(),
                 .exp_avg_A = exp_avg.view(),
                 .exp_avg_sq_A = exp_avg_sq.view(),
                 .segments = kSegments,
                 .beta1 = kRule.beta1,
                 .beta2 = kRule.beta2,
                 .eps = kRule.eps,
                 .weight_decay = kRule.weight_decay,
                 .update_5 = update.view()};
  const auto untouched = weights.bytes();
  for (int64_t step = 1; step <= 3; ++step) {
    const auto gradient = normals(static_cast<uint64_t>(100 + step), kElements, v.grad);
    grad.set(gradient);
    update.set(update_of(step, 1));
    adamw(ctx(), args);
    for_each_element([&](size_t i, bool decay) {
      ref::AdamwRule rule = kRule;
      if (!decay) rule.weight_decay = 0.0;
      want[i] = ref::adamw(want[i], kFactor * gradient[i], rule, step);
    });
  }
  std::vector<double> param, avg, avg_sq;
  for (const ref::AdamwState& state : want) {
    param.push_back(state.param);
    avg.push_back(state.exp_avg);
    avg_sq.push_back(state.exp_avg_sq);
  }
  const DType param_type = exact && v.moments == DType::kF32 ? DType::kF32 : DType::kBF16;
  if (v.masters == Masters::kF32) {
    EXPECT_CLOSE(inside(master.values()), inside(param), param_type);
  }
  if (v.masters == Masters::kRemainder) {
    std::vector<double> joined;
    const auto got = weights.values(), rest = remainder.values();
    for (size_t i = 0; i < got.size(); ++i) {
      joined.push_back(static_cast<double>(
          join_master(bf16_from_float(static_cast<float>(got[i])), static_cast<uint16_t>(rest[i]))));
    }
    EXPECT_CLOSE(inside(joined), inside(param), param_type);
  }
  EXPECT_CLOSE(inside(weights.values()), inside(param), v.weights == DType::kF32 ? param_type : DType::kBF16);
  EXPECT_CLOSE(inside(exp_avg.values()), inside(avg), v.moments);
  EXPECT_CLOSE(inside(exp_avg_sq.values()), inside(avg_sq), v.moments);
  // Between the segments nothing changes.
  auto outside = weights.bytes();
  const size_t size = dtype_size(v.weights);
  for_each_element([&](size_t i, bool) {
    std::copy_n(untouched.begin() + static_cast<int64_t>(i * size), size,
                outside.begin() + static_cast<int64_t>(i * size));
  });
  EXPECT_EQ(outside, untouched);
  EXPECT_TRUE(weights.padding_untouched() && exp_avg.padding_untouched() && exp_avg_sq.padding_untouched());
  const auto last = weights.bytes(), moments = exp_avg.bytes();
  update.set(update_of(4, 0));
  adamw(ctx(), args);
  EXPECT_EQ(weights.bytes(), last);
  EXPECT_EQ(exp_avg.bytes(), moments);
}

TEST_F(CudaAdamwTest, EveryVariantFollowsTheReferenceInItsSegmentsOnly) {
  for (const DType grad : kComputeTypes) {
    for (const DType moments : kComputeTypes) {
      SCOPED_TRACE(fmt::format("gradients {}, moments {}", dtype_name(grad), dtype_name(moments)));
      follow({DType::kF32, Masters::kNone, grad, moments});
      follow({DType::kBF16, Masters::kF32, grad, moments});
      follow({DType::kBF16, Masters::kRemainder, grad, moments});
      follow({DType::kBF16, Masters::kNone, grad, moments});
    }
  }
}

// Weights [experts, out, in] with what an update makes of them.
struct CodedState {
  CodedState(Context& ctx, DType grad_type, DType moments, int64_t elements)
      : weights(ctx, DType::kBF16, Shape{elements}),
        master(ctx, DType::kF32, Shape{elements}),
        remainder(ctx, DType::kU16, Shape{elements}),
        grad(ctx, grad_type, Shape{elements}),
        exp_avg(ctx, moments, Shape{elements}),
        exp_avg_sq(ctx, moments, Shape{elements}) {}
  std::vector<std::vector<uint8_t>> bytes() {
    return {weights.bytes(), master.bytes(), remainder.bytes(), exp_avg.bytes(), exp_avg_sq.bytes()};
  }
  GpuTensor weights, master, remainder, grad, exp_avg, exp_avg_sq;
};

// Codes of weights in memory of their own.
struct CodedWeights {
  CodedWeights(Context& ctx, int64_t experts, int64_t out, int64_t in, ScaleRule rule, bool transposed)
      : codes(ctx, DType::kU8, Shape{experts, out, in}),
        turned(ctx, DType::kU8, Shape{experts, in, out}),
        scales(ctx, DType::kF32, Shape{experts * (out / 128 + 1), in / 128}) {
    view = {.rule = rule, .codes_EOI = codes.view(), .scales_NB = scales.view()};
    if (transposed) view.transposed_EIO = turned.view();
  }
  std::vector<std::vector<uint8_t>> bytes() { return {codes.bytes(), turned.bytes(), scales.bytes()}; }
  GpuTensor codes, turned, scales;
  WeightCodes view;
};

void quantize_into(Context& ctx, const TensorView& weights, const WeightCodes& codes) {
  const Shape& shape = codes.codes_EOI.shape;
  const Shape matrix{shape[0] * shape[1], shape[2]};
  QuantizeArgs args{.x_RC = TensorView(weights.data, weights.dtype, matrix)};
  args.rule = codes.rule;
  args.block = {128, 128};
  args.group_rows = shape[1];
  args.data_RC = TensorView(codes.codes_EOI.data, DType::kU8, matrix);
  args.scales_NB = codes.scales_NB;
  if (codes.transposed_EIO) {
    args.transposed_CR =
        TensorView(codes.transposed_EIO.data, DType::kU8, Shape{shape[0] * shape[2], shape[1]});
  }
  quantize(ctx, args);
}

// Codes are those of quantize() in every byte, and what is updated is what it is without them.
TEST_F(CudaAdamwTest, WritesTheCodesOfTheNewWeights) {
  constexpr int64_t kBig = 3 * 256 * 384, kSmall = 128 * 128, kMx = 2 * 96 * 544;
  constexpr int64_t kSmallBegin = kBig + 112, kMxBegin = kSmallBegin + kSmall + 8;
  const std::vector<ArenaSegment> segments = {{8, kBig, true},
                                              {kBig + 9, 100, true},
                                              {kSmallBegin, 0, false},
                                              {kSmallBegin, kSmall, false},
                                              {kMxBegin, kMx, true}};
  constexpr int64_t kAll = kMxBegin + kMx + 5;
  for (const Masters masters : {Masters::kNone, Masters::kF32, Masters::kRemainder}) {
    for (const DType grad : kComputeTypes) {
      for (const DType moments : kComputeTypes) {
        SCOPED_TRACE(fmt::format("masters {}, gradients {}, moments {}", static_cast<int>(masters),
                                 dtype_name(grad), dtype_name(moments)));
        CodedState plain(ctx(), grad, moments, kAll), coded(ctx(), grad, moments, kAll);
        CodedWeights big(ctx(), 3, 256, 384, ScaleRule::kFloat, true);
        CodedWeights small(ctx(), 1, 128, 128, ScaleRule::kPowerOfTwo, false);
        GpuMxWeights mx(ctx(), DType::kBF16, Shape{2, 96, 544}, ScaleRule::kMxUp);
        GpuTensor update(ctx(), DType::kF64, Shape{kNumUpdateValues});
        auto start = normals(1, kAll, DType::kF32, 0.02), gradient = normals(2, kAll, grad);
        for (int64_t row = 0; row < 128; ++row) {  // a block of zeros
          std::fill_n(start.begin() + 8 + row * 384, 128, 0.0);
          std::fill_n(gradient.begin() + 8 + row * 384, 128, 0.0);
        }
        start[8 + 128 * 384] = 1e30;
        start[8 + 130 * 384] = 1e-40;
        gradient[8 + 256 * 384] = INFINITY;  // leaves NaN
        start[kMxBegin + 40 * 544 + 530] = 1000.0;
        const auto arguments = [&](CodedState& state) {
          std::vector<double> high, low;
          for (const double value : start) {
            const SplitMaster split = split_master(static_cast<float>(value));
            high.push_back(static_cast<double>(float_from_bf16(split.weight)));
            low.push_back(split.remainder);
          }
          state.weights.set(high);
          state.master.set(start);
          state.remainder.set(low);
          state.grad.set(gradient);
          state.exp_avg.fill(0);
          state.exp_avg_sq.fill(0);
          return AdamwArgs{
              .weights_A = state.weights.view(),
              .master_A = masters == Masters::kF32 ? state.master.view() : TensorView(),
              .remainder_A = masters == Masters::kRemainder ? state.remainder.view() : TensorView(),
              .grad_A = state.grad.view(),
              .exp_avg_A = state.exp_avg.view(),
              .exp_avg_sq_A = state.exp_avg_sq.view(),
              .segments = segments,
              .beta1 = kRule.beta1,
              .beta2 = kRule.beta2,
              .eps = kRule.eps,
              .weight_decay = kRule.weight_decay,
              .update_5 = update.view()};
        };
        const AdamwArgs without = arguments(plain);
        AdamwArgs with = arguments(coded);
        const std::vector<WeightCodes> codes = {big.view, {}, {}, small.view, {.mx = mx.view}};
        with.codes = codes;
        const auto untouched = big.bytes(), mx_untouched = mx.bytes();
        update.set(update_of(1, 0));
        adamw(ctx(), with);
        EXPECT_EQ(big.bytes(), untouched);
        EXPECT_EQ(mx.bytes(), mx_untouched);
        for (int64_t step = 1; step <= 2; ++step) {
          update.set(update_of(step, 1));
          adamw(ctx(), without);
          adamw(ctx(), with);
          ASSERT_EQ(coded.bytes(), plain.bytes());
          CodedWeights want_big(ctx(), 3, 256, 384, ScaleRule::kFloat, true);
          CodedWeights want_small(ctx(), 1, 128, 128, ScaleRule::kPowerOfTwo, false);
          quantize_into(ctx(), plain.weights.view().rows(8, kBig), want_big.view);
          quantize_into(ctx(), plain.weights.view().rows(kSmallBegin, kSmall), want_small.view);
          GpuMxWeights want_mx(ctx(), DType::kBF16, Shape{2, 96, 544}, ScaleRule::kMxUp);
          write_mx_weights(ctx(), {.w_EOI = TensorView(plain.weights.view().rows(kMxBegin, kMx).data,
                                                       DType::kBF16, Shape{2, 96, 544}),
                                   .to = want_mx.view});
          ASSERT_EQ(big.bytes(), want_big.bytes());
          ASSERT_EQ(small.bytes(), want_small.bytes());
          ASSERT_EQ(mx.bytes(), want_mx.bytes());
        }
        EXPECT_NE(big.bytes(), untouched);
      }
    }
  }
}

TEST_F(CudaAdamwTest, SumsOfSquaresMatchAndRepeat) {
  // More segments than one launch takes.
  std::vector<ArenaSegment> segments = kSegments;
  for (int64_t i = 0; i < 1500; ++i) segments.push_back({i * 100 + i % 9, i % 90, true});
  for (const DType dtype : kComputeTypes) {
    GpuTensor x(ctx(), dtype, Shape{kElements});
    const auto values = normals(1, kElements, dtype);
    x.set(values);
    std::vector<double> want;
    for (const ArenaSegment& segment : segments) {
      double sum = 0.0;
      for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
        sum += values[static_cast<size_t>(i)] * values[static_cast<size_t>(i)];
      }
      want.push_back(sum);
    }
    const Shape shape{static_cast<int64_t>(segments.size())};
    GpuTensor sums(ctx(), DType::kF64, shape), again(ctx(), DType::kF64, shape);
    Context& scratch = with_scratch(sum_squares_scratch_bytes(Device::kCuda, segments));
    sum_squares(scratch, {.x_A = x.view(), .segments = segments, .sums_S = sums.view()});
    sum_squares(scratch, {.x_A = x.view(), .segments = segments, .sums_S = again.view()});
    EXPECT_CLOSE(sums.values(), want, DType::kF64);
    EXPECT_EQ(sums.bytes(), again.bytes());
    EXPECT_TRUE(sums.padding_untouched());
    // Every third segment has partial sums.
    constexpr int64_t kPartials = 1000;
    GpuTensor partials(ctx(), DType::kF32, Shape{kPartials});
    const auto parts = normals(2, kPartials, DType::kF32);
    partials.set(parts);
    std::vector<TensorView> views(segments.size());
    for (size_t i = 0; i < segments.size(); i += 3) {
      views[i] = partials.view();
      want[i] = std::accumulate(parts.begin(), parts.end(), 0.0);
    }
    sum_squares(scratch, {.x_A = x.view(), .segments = segments, .sums_S = again.view(), .partials = views});
    EXPECT_CLOSE(again.values(), want, DType::kF64);
  }
}

TEST_F(CudaAdamwTest, ClipsByTheNormAndRefusesWhatIsNotFinite) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  GpuTensor sums(ctx(), DType::kF64, Shape{300}), loss(ctx(), DType::kF64, Shape{3});
  GpuTensor norm(ctx(), DType::kF64, Shape{1}), factor(ctx(), DType::kF64, Shape{1}),
      apply(ctx(), DType::kF64, Shape{1});
  ClipFactorArgs args{.sums_S = sums.view(),
                      .loss_sums_3 = loss.view(),
                      .max_norm = 1.0,
                      .norm_1 = norm.view(),
                      .factor_1 = factor.view(),
                      .apply_1 = apply.view()};
  const auto expect = [&](double want_norm, double want_factor, double want_apply) {
    clip_factor(ctx(), args);
    EXPECT_CLOSE(norm.values(), std::vector<double>{want_norm}, DType::kF64);
    EXPECT_CLOSE(factor.values(), std::vector<double>{want_factor}, DType::kF64);
    EXPECT_EQ(apply.values()[0], want_apply);
  };
  sums.fill(3.0);
  loss.fill(1.0);
  expect(30.0, 1.0 / (30.0 + 1e-6), 1.0);
  args.max_norm = 0;
  expect(30.0, 1.0, 1.0);
  args.max_norm = 31;
  expect(30.0, 1.0, 1.0);
  loss.set({1, 2, kInf});
  expect(30.0, 1.0, 0.0);
  args.loss_sums_3 = {};
  expect(30.0, 1.0, 1.0);
  sums.fill(std::nan(""));
  expect(std::nan(""), 1.0, 0.0);
}

}  // namespace
}  // namespace biomoe::test
