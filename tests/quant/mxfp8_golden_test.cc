// MXFP8 against tensors that another program has quantised: every code and every scale.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "biomoe/checkpoint/safetensors.h"
#include "biomoe/ops/quantize.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> golden_files() {
  const char* from_environment = std::getenv("BIOMOE_MXFP8_GOLDENS");
  const fs::path root =
      from_environment ? fs::path(from_environment) : fs::path(BIOMOE_TEST_DATA) / "goldens/mxfp8";
  std::vector<fs::path> files;
  std::error_code error;  // a folder that cannot be read leaves none, which CasesAreThere reports
  for (const auto& entry : fs::directory_iterator(root, error)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<uint8_t> read_bytes(const SafetensorsFile& file, const std::string& name) {
  const auto bytes = file.bytes(file.at(name));
  return {bytes.begin(), bytes.end()};
}

class Mxfp8GoldenTest : public testing::TestWithParam<fs::path> {
 protected:
  void SetUp() override {
    const SafetensorsEntry& entry = file_.at("source");
    ASSERT_EQ(entry.dtype, DType::kF32);
    ASSERT_EQ(entry.shape.rank(), 2);
    shape_ = entry.shape;
    source_.resize(static_cast<size_t>(shape_.num_elements()));
    std::memcpy(source_.data(), file_.bytes(entry).data(), source_.size() * sizeof(float));
  }

  // Quantises the source and compares with NAME.data and NAME.scale.
  void expect_codes(const std::string& name, ScaleRule rule, BlockShape block) {
    QuantizeArgs args{.x_RC = TensorView(source_.data(), DType::kF32, shape_), .rule = rule, .block = block};
    const BlockGrid grid = block_grid(args);
    std::vector<uint8_t> data(source_.size(), 0xcc);
    std::vector<uint8_t> scales(static_cast<size_t>(grid.bands() * grid.block_columns()), 0xcc);
    dequantized_.assign(source_.size(), -1.0f);
    args.data_RC = TensorView(data.data(), DType::kU8, shape_);
    args.scales_NB = TensorView(scales.data(), DType::kU8, Shape{grid.bands(), grid.block_columns()});
    args.dequantized_RC = TensorView(dequantized_.data(), DType::kF32, shape_);
    Context ctx;
    quantize(ctx, args);
    EXPECT_EQ(file_.at(name + ".scale").shape, args.scales_NB.shape);
    EXPECT_EQ(scales, read_bytes(file_, name + ".scale"));
    EXPECT_EQ(data, read_bytes(file_, name + ".data"));
  }

  SafetensorsFile file_{GetParam()};
  Shape shape_;
  std::vector<float> source_, dequantized_;
};

TEST_P(Mxfp8GoldenTest, RowWiseCodesAndScales) {
  expect_codes("row", ScaleRule::kMxUp, {1, 32});
}

TEST_P(Mxfp8GoldenTest, RowWiseValues) {
  expect_codes("row", ScaleRule::kMxUp, {1, 32});
  const auto bytes = read_bytes(file_, "row.dequant");
  std::vector<float> want(source_.size());
  ASSERT_EQ(bytes.size(), want.size() * sizeof(float));
  std::memcpy(want.data(), bytes.data(), bytes.size());
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i])) {
      EXPECT_TRUE(std::isnan(dequantized_[i])) << i;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(dequantized_[i]), std::bit_cast<uint32_t>(want[i])) << i;
    }
  }
}

TEST_P(Mxfp8GoldenTest, ColumnWiseCodesAndScales) {
  expect_codes("col", ScaleRule::kMxUp, {32, 1});
}

TEST_P(Mxfp8GoldenTest, CodesAndScalesOfTheOcpRule) {
  expect_codes("floor", ScaleRule::kMxFloor, {1, 32});
}

INSTANTIATE_TEST_SUITE_P(Goldens, Mxfp8GoldenTest, testing::ValuesIn(golden_files()),
                         [](const auto& instance) {
                           std::string name = instance.param.stem().string();
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
                           return name;
                         });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Mxfp8GoldenTest);

TEST(Mxfp8GoldenTest, CasesAreThere) {
  EXPECT_FALSE(golden_files().empty());
}

}  // namespace
}  // namespace biomoe
