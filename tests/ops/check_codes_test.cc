// Operands that are MX codes, checked as for a GPU, without one.
#include "biomoe/ops/check_codes.h"

#include "tests/ops/op_test.h"

namespace biomoe::test {
namespace {

constexpr int64_t kRows = 256, kExperts = 3;
const Shape kWeights{kExperts, 160, 96};  // out 160, in 96

// Scales of so many matrices of rows x columns: whole tiles of 128 rows and 128 columns, 512 bytes each.
int64_t scale_bytes(int64_t matrices, int64_t rows, int64_t columns) {
  return matrices * ((rows + 127) / 128) * ((columns + 127) / 128) * 512;
}

TensorView bytes(const Shape& shape) {
  static uint8_t memory;
  return {&memory, DType::kU8, shape};
}

MxCodes codes_of(MxProduct product) {
  const int64_t out = kWeights[1], in = kWeights[2];
  switch (product) {
    case MxProduct::kForward:
      return {bytes({kRows, in}), bytes({scale_bytes(1, kRows, in)}), bytes({kExperts, out, in}),
              bytes({scale_bytes(kExperts, out, in)})};
    case MxProduct::kDgrad:
      return {bytes({kRows, out}), bytes({scale_bytes(1, kRows, out)}), bytes({kExperts, in, out}),
              bytes({scale_bytes(kExperts, in, out)})};
    default:
      return {bytes({out, kRows}), bytes({scale_bytes(1, out, kRows)}), bytes({in, kRows}),
              bytes({scale_bytes(1, in, kRows)})};
  }
}

constexpr MxProduct kProducts[] = {MxProduct::kForward, MxProduct::kDgrad, MxProduct::kWgrad};

TEST(CheckMxCodes, TakesWhatEachProductReadsAndNothingElse) {
  for (const MxProduct product : kProducts) {
    const MxCodes good = codes_of(product);
    EXPECT_NO_THROW(check_mx_codes("op", good, product, kRows, kWeights));
    for (TensorView MxCodes::*member : {&MxCodes::a, &MxCodes::a_scales, &MxCodes::b, &MxCodes::b_scales}) {
      MxCodes bad = good;
      bad.*member = bytes({1, 1});
      EXPECT_THROW(check_mx_codes("op", bad, product, kRows, kWeights), Error);
    }
    for (const MxProduct other : kProducts) {
      if (other == product) continue;
      EXPECT_THROW(check_mx_codes("op", good, other, kRows, kWeights), Error);
    }
  }
}

TEST(CheckMxCodes, WidthsAreWholeBlocksAndRowsSumInSixteens) {
  const MxCodes codes = codes_of(MxProduct::kWgrad);
  EXPECT_THROW(check_mx_codes("op", codes, MxProduct::kForward, kRows, Shape{1, 80, 96}), Error);
  EXPECT_THROW(check_mx_codes("op", codes, MxProduct::kWgrad, 40, kWeights), Error);
}

}  // namespace
}  // namespace biomoe::test
