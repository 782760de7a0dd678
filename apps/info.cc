#include <htslib/hts.h>

#include "apps/commands.h"
#include "biomoe/core/version.h"
#include "biomoe/dist/gpus.h"
#include "biomoe/dist/transport.h"
#include "biomoe/ops/device.h"
#include "biomoe/train/run_config.h"
#include "biomoe/train/selftest.h"

namespace biomoe::apps {
namespace {

void print_gpu() {
  std::string why;
  if (!device_available(Device::kCuda, &why)) {
    fmt::print("cuda       {}\n", why);
    return;
  }
  const DeviceInfo gpu = device_info(Device::kCuda);
  const bool hopper = gpu.compute_capability == 90;
  fmt::print("cuda       {}, compute capability {}.{}, {} multiprocessors, {:.1f} of {:.1f} GiB free\n",
             gpu.name, gpu.compute_capability / 10, gpu.compute_capability % 10, gpu.multiprocessors,
             static_cast<double>(gpu.free_bytes) / 0x1p30, static_cast<double>(gpu.memory_bytes) / 0x1p30);
  fmt::print("           driver {}, runtime {}\n", gpu.driver, gpu.runtime);
  const int generation = gpu.compute_capability / 10;
  fmt::print("           bf16; expert_ffn_mode: {}; attention: {}\n",
             hopper ? "loop, grouped_linear, fused_grouped_mlp (auto)" : "loop (auto)",
             generation == 9 || generation == 10 ? "cuDNN" : "in tiles");
}

void print_ranks() {
  const std::string_view mpi = mpi::library();
  const std::string nccl = nccl::library();
  fmt::print("ranks      on CPUs: {}; on GPUs: {}\n", mpi.empty() ? "TCP (built without MPI)" : mpi,
             nccl.empty() ? "built without NCCL" : nccl);
}

void print_recipes() {
  fmt::print("\n{:<22} {:<12} {}\n", "fp8_recipe", "cpu", "cuda");
  for (size_t i = 0; i < kFp8RecipeNames.size(); ++i) {
    const auto report = [&](Device device) { return recipe_report(static_cast<Fp8Recipe>(i), device); };
    const auto name = [](RecipeSupport support) { return kRecipeSupportNames[static_cast<size_t>(support)]; };
    const RecipeReport gpu = report(Device::kCuda);
    // A missing GPU is told above.
    const bool told = gpu.support != RecipeSupport::kUnavailable && !gpu.reason.empty();
    fmt::print("{:<22} {:<12} {}{}{}\n", kFp8RecipeNames[i], name(report(Device::kCpu).support),
               name(gpu.support), told ? ": " : "", told ? gpu.reason : "");
  }
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "versions and devices");
  command->callback([] {
    fmt::print("biomoe {}\n", kVersion);
    fmt::print("compiler   {}\n", __VERSION__);
    fmt::print("htslib     {}\n", hts_version());
    fmt::print(
        "cpu        {} threads, fp32; expert_ffn_mode: loop, grouped_linear, fused_grouped_mlp (auto)\n",
        resolved_threads(0));
    print_gpu();
    print_ranks();
    print_recipes();
  });
}

}  // namespace biomoe::apps
