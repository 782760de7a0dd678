// MxWeights on the GPU: what quantize() there gives, in every byte.
#include "biomoe/ops/mx_weights.h"

#include "biomoe/ops/quantize.h"
#include "tests/cuda/gpu_mx_weights.h"
#include "tests/ops/mx_weights_cases.h"

namespace biomoe::test {
namespace {

class CudaMxWeightsTest : public GpuTest {};

TEST_F(CudaMxWeightsTest, IsWhatQuantizeGivesInEachDirection) {
  std::vector<Shape> shapes = kMxWeightShapes;
  shapes.push_back({2, 1024, 2080});  // more squares than a block of threads turns
  for (const Shape& shape : shapes) {
    for (const DType type : kComputeTypes) {
      for (const ScaleRule rule : {ScaleRule::kMxUp, ScaleRule::kMxFloor}) {
        SCOPED_TRACE(fmt::format("{} {} rule {}", shape.str(), dtype_name(type), static_cast<int>(rule)));
        GpuTensor w(ctx(), type, shape);
        w.set(mx_weight_values(shape));
        GpuMxWeights kept(ctx(), type, shape, rule);
        write_mx_weights(ctx(), {.w_EOI = w.view(), .to = kept.view});
        DirectMx rows(ctx(), w.view(), rule, false), columns(ctx(), w.view(), rule, true);
        EXPECT_EQ(kept.values.bytes(), rows.values.bytes());
        EXPECT_EQ(kept.column_scales.bytes(), columns.scales.bytes());
        EXPECT_NE(rows.values.bytes(), columns.values.bytes());  // else nothing is tested
        EXPECT_EQ(kept.differ.values(), differing_runs(rows.values, columns.values));
        for (const bool by_column : {true, true, false, false, true}) {
          turn_mx_weights(ctx(), {.w_EOI = w.view(), .of = kept.view, .by_column = by_column});
          EXPECT_EQ(kept.values.bytes(), (by_column ? columns : rows).values.bytes());
        }
        EXPECT_TRUE(kept.untouched());
      }
    }
  }
}

}  // namespace
}  // namespace biomoe::test
