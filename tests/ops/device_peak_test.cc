#include "biomoe/ops/device_peak.h"

#include <gtest/gtest.h>

namespace biomoe {
namespace {

TEST(DevicePeak, GoesByTheNameThatTheDriverGives) {
  EXPECT_EQ(peak_bf16_flops("NVIDIA H200"), 989.4e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA H200 NVL"), 835.5e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA GH200 480GB"), 989.4e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA H100 80GB HBM3"), 989.4e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA A100 80GB PCIe"), 312e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA A10G"), 70e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA L40S"), 362e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA L4"), 121e12);
}

TEST(DevicePeak, IsNotGuessed) {
  for (const char* name : {"", "NVIDIA GeForce RTX 4090", "NVIDIA H200 MIG 1g.18gb", "AMD EPYC",
                           "NVIDIA H100", "NVIDIA RTX A1000", "XL4"}) {
    EXPECT_FALSE(peak_bf16_flops(name)) << name;
  }
}

}  // namespace
}  // namespace biomoe
