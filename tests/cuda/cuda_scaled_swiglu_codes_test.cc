// SwiGLU to codes at once, against the operations that it stands for one after the other, in every byte.
#include "biomoe/ops/scaled_swiglu_codes.h"

#include <array>
#include <bit>
#include <cstring>

#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/quantize.h"
#include "biomoe/ops/scaled_swiglu.h"
#include "biomoe/quant/compact_bf16.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {
namespace {

constexpr int64_t kBlock = 128;
constexpr DType kType = DType::kBF16;

struct Case {
  std::vector<int64_t> counts;  // rows of the experts
  int64_t width;                // of act
  ScaleRule rule = ScaleRule::kPowerOfTwo;
  int64_t spare_rows = 128;  // belong to nobody
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << testing::PrintToString(c.counts) << " rows of " << c.width << " and " << c.spare_rows << ", rule "
      << static_cast<int>(c.rule);
}

class CudaScaledSwigluCodesTest : public GpuTest, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    std::vector<double> offsets{0};
    for (const int64_t count : GetParam().counts) {
      const auto padded = static_cast<double>((count + kBlock - 1) / kBlock * kBlock);
      for (double r = 0; r < padded; ++r) real_.push_back(r < static_cast<double>(count));
      offsets.push_back(offsets.back() + padded);
    }
    rows_ = static_cast<int64_t>(real_.size()) + GetParam().spare_rows;
    offsets_ = make(DType::kI64, Shape{static_cast<int64_t>(offsets.size())});
    offsets_->set(offsets);
    const int64_t width = GetParam().width;
    gate_up_ = matrix(1, 2 * width);
    const std::vector<uint8_t> bytes = gate_up_->bytes();
    gate_up_bits_.resize(bytes.size() / 2);
    std::memcpy(gate_up_bits_.data(), bytes.data(), bytes.size());
    dact_ = matrix(2, width);
    probs_ = make(DType::kF32, Shape{rows_});
    probs_->set(rows_of(normals(3, rows_, DType::kF32, 0.5), 1));
  }

  std::unique_ptr<GpuTensor> make(DType type, const Shape& shape) {
    return std::make_unique<GpuTensor>(ctx(), type, shape);
  }

  // Zero in padding, poison in rows of nobody.
  std::vector<double> rows_of(std::vector<double> x, int64_t columns) const {
    for (int64_t r = 0; r < rows_; ++r) {
      const auto at = static_cast<size_t>(r);
      if (at < real_.size() && real_[at]) continue;
      std::fill_n(x.begin() + r * columns, columns, at < real_.size() ? 0.0 : std::nan(""));
    }
    return x;
  }
  // Normal numbers with zeros, a few that are large, and a few that are small beside their neighbours.
  std::unique_ptr<GpuTensor> matrix(uint64_t seed, int64_t columns) {
    std::vector<double> x = normals(seed, rows_ * columns, kType);
    for (size_t i = 0; i < x.size(); i += 31) x[i] = 0.0;
    for (size_t i = 5; i < x.size(); i += 397) x[i] *= 64.0;
    for (size_t i = 7; i < x.size(); i += 53) x[i] *= 0x1p-16;
    auto to = make(kType, Shape{rows_, columns});
    to->set(rows_of(x, columns));
    return to;
  }

  // The codes of x both ways, into poisoned memory.
  struct Codes {
    std::unique_ptr<GpuTensor> rows, row_scales, columns, column_scales;
  };
  Codes codes_of(int64_t columns) {
    return {make(DType::kU8, Shape{rows_, columns}),
            make(DType::kF32, Shape{columns / kBlock, row_scales_stride(rows_)}),
            make(DType::kU8, Shape{columns, rows_}),
            make(DType::kF32, Shape{(rows_ + kBlock - 1) / kBlock, columns})};
  }
  Codes quantized(const GpuTensor& x) {
    Codes codes = codes_of(x.view().shape[1]);
    quantize(ctx(), {.x_RC = x.view(),
                     .rule = GetParam().rule,
                     .block = {1, kBlock},
                     .offsets_E1 = offsets_->view(),
                     .data_RC = codes.rows->view(),
                     .row_scales_BR = codes.row_scales->view(),
                     .column_codes_CR = codes.columns->view(),
                     .column_scales_BC = codes.column_scales->view()});
    return codes;
  }
  static void expect_rows(const Codes& got, const Codes& want) {
    EXPECT_EQ(got.rows->bytes(), want.rows->bytes());
    EXPECT_EQ(got.row_scales->bytes(), want.row_scales->bytes());
  }
  static void expect_columns(const Codes& got, const Codes& want) {
    EXPECT_EQ(got.columns->bytes(), want.columns->bytes());
    EXPECT_EQ(got.column_scales->bytes(), want.column_scales->bytes());
  }

  // What forward keeps of gate and up, in rows of groups; poison elsewhere.
  std::vector<uint8_t> kept() const {
    const int64_t width = GetParam().width;
    const CompactLayout layout{rows_, width};
    std::vector<uint8_t> to(static_cast<size_t>(layout.bytes()), 0xff);
    for_each_group([&](int64_t row, int64_t group, int64_t part, const uint16_t* from) {
      std::array<uint16_t, 8> bits;
      std::copy_n(from, 8, bits.begin());
      const CompactBf16 eight = CompactBf16::of(bits);
      const int64_t place = (row * layout.groups() + group) * 2 + part;
      std::copy(eight.low.begin(), eight.low.end(), to.begin() + place * 8);
      std::memcpy(to.data() + layout.high_plane() + place * 4, &eight.high, 4);
      const int64_t four = (row / 4 * layout.groups() + group) * 2 + part;
      to[static_cast<size_t>(layout.exponent_plane() + four * 4 + row % 4)] = eight.exponent;
    });
    return to;
  }
  // What comes back of it.
  std::unique_ptr<GpuTensor> kept_gate_up() {
    std::vector<double> values = gate_up_->values();
    for_each_group([&](int64_t, int64_t, int64_t, const uint16_t* from) {
      std::array<uint16_t, 8> bits;
      std::copy_n(from, 8, bits.begin());
      bits = CompactBf16::of(bits).bits();
      for (size_t i = 0; i < bits.size(); ++i) {
        values[static_cast<size_t>(from - gate_up_bits_.data()) + i] =
            static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16));
      }
    });
    auto to = make(kType, gate_up_->view().shape);
    to->set(values);
    return to;
  }
  // Of each group of eight gates (part 0) or ups of a row of a group.
  template <typename Use>
  void for_each_group(const Use& use) const {
    const int64_t width = GetParam().width;
    for (int64_t row = 0; row < static_cast<int64_t>(real_.size()); ++row) {
      for (int64_t group = 0; group < width / 8; ++group) {
        for (int64_t part = 0; part < 2; ++part) {
          const int64_t turn = 8 * group / cuda::kGateUpInterleave * 2 + part;
          const int64_t column = turn * cuda::kGateUpInterleave + 8 * group % cuda::kGateUpInterleave;
          use(row, group, part, gate_up_bits_.data() + row * 2 * width + column);
        }
      }
    }
  }

  // What is quantised one after the other.
  std::unique_ptr<GpuTensor> act(const GpuTensor& gate_up) {
    auto to = make(kType, Shape{rows_, GetParam().width});
    scaled_swiglu_forward(ctx(), {.gate_up_R2F = gate_up.view(),
                                  .probs_R = probs_->view(),
                                  .act_RF = to->view(),
                                  .offsets_E1 = offsets_->view(),
                                  .interleave = cuda::kGateUpInterleave});
    return to;
  }

  int64_t rows_ = 0;
  std::vector<bool> real_;  // of the rows of groups
  std::unique_ptr<GpuTensor> offsets_, gate_up_, dact_, probs_;
  std::vector<uint16_t> gate_up_bits_;
};

TEST_P(CudaScaledSwigluCodesTest, Forward) {
  const Codes want = quantized(*act(*gate_up_));
  const std::vector<uint8_t> gate_up = gate_up_->bytes();
  const auto kept_memory = make(DType::kU8, Shape{rows_, CompactLayout::row_bytes(GetParam().width)});
  for (const bool keep : {false, true}) {
    const Codes got = codes_of(GetParam().width);
    scaled_swiglu_codes_forward(ctx(), {.gate_up_R2F = gate_up_->view(),
                                        .probs_R = probs_->view(),
                                        .offsets_E1 = offsets_->view(),
                                        .act_codes_RF = got.rows->view(),
                                        .act_row_scales_BR = got.row_scales->view(),
                                        .kept_RC = keep ? kept_memory->view() : TensorView(),
                                        .rule = GetParam().rule,
                                        .interleave = cuda::kGateUpInterleave});
    expect_rows(got, want);
    EXPECT_EQ(gate_up_->bytes(), gate_up);
    const std::vector<uint8_t>& bytes = kept_memory->bytes();  // and poison after them
    std::vector<uint8_t> expected = keep ? kept() : std::vector<uint8_t>();
    expected.resize(bytes.size(), 0xff);
    EXPECT_TRUE(bytes == expected);
  }
}

TEST_P(CudaScaledSwigluCodesTest, Backward) {
  const int64_t width = GetParam().width;
  const auto gate_up = kept_gate_up(), dgate_up = make(kType, Shape{rows_, 2 * width});
  const auto kept_memory = make(DType::kU8, Shape{rows_, CompactLayout::row_bytes(width)});
  const std::vector<uint8_t> kept_bytes = kept();
  copy_to_device(ctx(), kept_memory->view().data, kept_bytes.data(), kept_bytes.size());
  const auto want_dprobs = make(DType::kF32, Shape{rows_});
  scaled_swiglu_backward(ctx(), {.dact_RF = dact_->view(),
                                 .gate_up_R2F = gate_up->view(),
                                 .probs_R = probs_->view(),
                                 .dgate_up_R2F = dgate_up->view(),
                                 .dprobs_R = want_dprobs->view(),
                                 .offsets_E1 = offsets_->view(),
                                 .interleave = cuda::kGateUpInterleave});
  const Codes want = quantized(*dgate_up), want_act = quantized(*act(*gate_up));
  const std::vector<double> dact = dact_->values();
  std::vector<uint8_t> first_dprobs;
  for (int run = 0; run < 2; ++run) {
    dact_->set(dact);
    const Codes got = codes_of(2 * width), got_act = codes_of(width);
    const auto dprobs = make(DType::kF32, Shape{rows_});
    scaled_swiglu_codes_backward(ctx(), {.dact_RF = dact_->view(),
                                         .kept_RC = kept_memory->view(),
                                         .probs_R = probs_->view(),
                                         .offsets_E1 = offsets_->view(),
                                         .dgate_up_codes_R2F = got.rows->view(),
                                         .dgate_up_row_scales_BR = got.row_scales->view(),
                                         .dgate_up_column_codes_2FR = got.columns->view(),
                                         .dgate_up_column_scales_B2F = got.column_scales->view(),
                                         .act_column_codes_FR = got_act.columns->view(),
                                         .act_column_scales_BF = got_act.column_scales->view(),
                                         .dprobs_R = dprobs->view(),
                                         .rule = GetParam().rule,
                                         .interleave = cuda::kGateUpInterleave});
    expect_rows(got, want);
    expect_columns(got, want);
    expect_columns(got_act, want_act);
    EXPECT_TRUE(std::equal(kept_bytes.begin(), kept_bytes.end(), kept_memory->bytes().begin()));
    // Summed in another order.
    EXPECT_CLOSE(dprobs->values(), want_dprobs->values(), DType::kF32);
    if (run == 0) first_dprobs = dprobs->bytes();
    EXPECT_EQ(dprobs->bytes(), first_dprobs) << "not the same twice";
    // The sums take their place in rows of groups alone.
    const std::vector<double> after = dact_->values();
    const auto nobodys = after.begin() + static_cast<int64_t>(real_.size()) * width;
    EXPECT_TRUE(std::all_of(nobodys, after.end(), [](double value) { return std::isnan(value); }));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaScaledSwigluCodesTest,
                         testing::Values(Case{{0, 1, 127, 128, 129, 64, 65, 0}, 384},
                                         Case{{0, 1, 127, 128, 129, 64, 65, 0}, 128, ScaleRule::kFloat},
                                         Case{{640}, 128, ScaleRule::kPowerOfTwo, 0},
                                         Case{{0, 0, 300, 0, 0}, 640, ScaleRule::kFloat, 16},
                                         Case{{0, 0, 0}, 256}, Case{{}, 128}, Case{{5, 200}, 14336}));

TEST(ScaledSwigluCodes, TheCpuRefuses) {
  Context cpu;
  std::vector<uint8_t> memory(1 << 20);
  int64_t offsets[2] = {0, 128};
  const auto view = [&](DType type, const Shape& shape) { return TensorView(memory.data(), type, shape); };
  ScaledSwigluCodesForwardArgs args{.gate_up_R2F = view(kType, Shape{128, 256}),
                                    .probs_R = view(DType::kF32, Shape{128}),
                                    .offsets_E1 = TensorView(offsets, DType::kI64, Shape{2}),
                                    .act_codes_RF = view(DType::kU8, Shape{128, 128}),
                                    .act_row_scales_BR = view(DType::kF32, Shape{1, 128}),
                                    .interleave = cuda::kGateUpInterleave};
  EXPECT_THROW(scaled_swiglu_codes_forward(cpu, args), Error);
}

}  // namespace
}  // namespace biomoe::test
