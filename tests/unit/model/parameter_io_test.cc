#include "biomoe/model/parameter_io.h"

#include "biomoe/ops/adamw.h"
#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

ModelConfig wide_config() {
  ModelConfig config = test::small_config();
  config.intermediate_size = 64;  // of which gate and up columns can take turns
  return config;
}

// Arenas of a device's types and layouts, in host memory.
class ParameterIoTest : public testing::Test {
 protected:
  ParameterIoTest()
      : config_(wide_config()),
        parameters_(config_),
        arena_(16 * static_cast<size_t>(parameters_.arena_elements()), "test"),
        io_(ctx_, compute_types(Device::kCuda, config_, false)) {
    ctx_.num_threads = 2;
  }
  TensorView arena(DType dtype) { return arena_.tensor(dtype, {parameters_.arena_elements()}); }
  std::vector<float> values_of(const ParamSpec& spec) const {
    const Rng rng(3, RngStream::kTest, static_cast<uint32_t>(spec.offset));
    std::vector<float> values;
    for (int64_t i = 0; i < spec.num_elements(); ++i) {
      values.push_back(static_cast<float>(rng.normal(static_cast<uint64_t>(i))));
    }
    return values;
  }

  ModelConfig config_;
  ParameterList parameters_;
  Context ctx_;
  Arena arena_;
  ParameterIo io_;
};

TEST_F(ParameterIoTest, MastersComeBackBitForBitFromOneArenaOrTwo) {
  const TensorView whole = arena(DType::kF32), weights = arena(DType::kBF16), remainder = arena(DType::kU16);
  ASSERT_GT(compute_types(Device::kCuda, config_, false).gate_up_interleave, 0);
  for (const auto& spec : parameters_.specs()) {
    const std::vector<float> values = values_of(spec);
    io_.write_sync(spec, values.data(), whole);
    io_.write_sync(spec, values.data(), weights);
    io_.write_sync(spec, values.data(), remainder);
  }
  for (const auto& spec : parameters_.specs()) {
    const std::vector<float> values = values_of(spec);
    std::vector<float> from_one(values.size(), NAN), from_two(values.size(), NAN),
        rounded(values.size(), NAN);
    io_.read_sync(spec, whole, from_one.data());
    io_.read_masters_sync(spec, {weights, parameters_.state_owners(spec)},
                          {remainder, parameters_.state_owners(spec)}, from_two.data());
    io_.read_sync(spec, weights, rounded.data());
    EXPECT_EQ(from_one, values) << spec.name;
    EXPECT_EQ(from_two, values) << spec.name;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(rounded[i], float_from_bf16(split_master(values[i]).weight)) << spec.name << " " << i;
    }
  }
}

}  // namespace
}  // namespace biomoe
