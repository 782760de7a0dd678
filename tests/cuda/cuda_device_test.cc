#include "biomoe/ops/device.h"

#include "biomoe/ops/fill.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {
namespace {

using CudaDeviceTest = GpuTest;

TEST_F(CudaDeviceTest, NamesTheGpu) {
  const DeviceInfo info = device_info(Device::kCuda);
  EXPECT_FALSE(info.name.empty());
  EXPECT_GE(info.compute_capability, 80);
  EXPECT_GT(info.multiprocessors, 0);
  EXPECT_GT(info.free_bytes, 0u);
  EXPECT_LE(info.free_bytes, info.memory_bytes);
}

TEST_F(CudaDeviceTest, MemoryReadsAsZeroAndRefusesWhatIsNotThere) {
  Arena arena(1 << 20, "test", device_memory(Device::kCuda));
  std::vector<uint8_t> bytes(1 << 20, 1);
  copy_to_host(ctx(), bytes.data(), arena.allocate(bytes.size()), bytes.size());
  device_wait_sync(ctx());
  EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size(), 0));
  EXPECT_THROW(Arena(size_t{1} << 50, "test", device_memory(Device::kCuda)), Error);
}

TEST_F(CudaDeviceTest, ARecordedStepRunsOnlyWhenReplayedAndDoesNotMakeTheHostWait) {
  GpuTensor from(ctx(), DType::kF32, Shape{1000}), to(ctx(), DType::kF32, Shape{1000});
  from.set(normals(1, 1000, DType::kF32));
  const auto before = to.bytes();
  RecordedStep::begin(ctx());
  copy_on_device(ctx(), to.view().data, from.view().data, to.view().bytes());
  RecordedStep step = RecordedStep::end(ctx());
  EXPECT_EQ(to.bytes(), before);
  const int64_t syncs = device_sync_calls();
  step.replay(ctx());
  EXPECT_EQ(device_sync_calls(), syncs);
  EXPECT_EQ(to.values(), from.values());
  EXPECT_GT(device_sync_calls(), syncs);
  from.fill(3);
  step.replay(ctx());
  EXPECT_EQ(to.values(), from.values());
}

TEST_F(CudaDeviceTest, AnAbandonedRecordingLeavesTheContextUsable) {
  GpuTensor x(ctx(), DType::kF32, Shape{10});
  RecordedStep::begin(ctx());
  fill_zero(ctx(), {.x = x.view()});
  RecordedStep::abandon(ctx());
  EXPECT_TRUE(std::isnan(x.values()[0]));
  fill_zero(ctx(), {.x = x.view()});
  EXPECT_EQ(x.values(), std::vector<double>(10, 0.0));
  EXPECT_TRUE(x.padding_untouched());
}

TEST_F(CudaDeviceTest, CopiesFromStagingMemoryDoNotMakeTheHostWait) {
  Arena staging(4096, "test", staging_memory(Device::kCuda));
  auto* host = static_cast<float*>(staging.allocate(4096));
  GpuTensor x(ctx(), DType::kF32, Shape{1024});
  std::fill_n(host, 1024, 2.0f);
  const int64_t syncs = device_sync_calls();
  DeviceTimer timer(ctx());
  timer.start();
  copy_to_device(ctx(), x.view().data, host, 4096);
  timer.stop();
  EXPECT_EQ(device_sync_calls(), syncs);
  EXPECT_GE(timer.elapsed_ms_sync(), 0.0);
  EXPECT_EQ(x.values(), std::vector<double>(1024, 2.0));
}

TEST_F(CudaDeviceTest, CountsWhatIsNotFinite) {
  for (const DType dtype : kComputeTypes) {
    for (const int64_t size : {0, 1, 7, 8, 9, 100003}) {
      GpuTensor x(ctx(), dtype, Shape{size}), count(ctx(), DType::kI64, Shape{1});
      std::vector<double> values(static_cast<size_t>(size), 3e38);
      double want = 0;
      for (size_t i = 0; i < values.size(); i += 3, ++want) {
        values[i] = i % 2 ? std::nan("") : -std::numeric_limits<double>::infinity();
      }
      x.set(values);
      count_nonfinite(ctx(), {.x = x.view(), .count_1 = count.view()});
      EXPECT_EQ(count.values()[0], want) << size;
    }
  }
}

}  // namespace
}  // namespace biomoe::test
