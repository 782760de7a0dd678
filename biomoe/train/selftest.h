// What a new machine is tried with: a tiny model is trained without and in each 8-bit recipe, and its loss is
// compared with one that was recorded beforehand.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/context.h"
#include "biomoe/ops/device.h"
#include "biomoe/quant/recipe.h"

namespace biomoe {

struct SelftestCase {
  std::string_view name;
  Fp8Config fp8;
  double loss = 0;  // recorded on the CPU: mean over all steps
};

inline constexpr int64_t kSelftestSteps = 60;

std::vector<SelftestCase> selftest_cases();

// How far a loss may be from the recorded one, as a share of it: CPUs differ in the order of sums, GPUs
// compute in BF16 besides.
double selftest_band();

// Trains and returns the loss. Throws failure when it is not finite.
double run_selftest(const SelftestCase& test, Device device, int num_threads);

// How a recipe's products run.
enum class RecipeSupport : uint8_t { kNative, kEmulated, kUnavailable };
inline constexpr std::array<std::string_view, 3> kRecipeSupportNames{"native", "emulated", "unavailable"};
struct RecipeReport {
  RecipeSupport support = RecipeSupport::kUnavailable;
  std::string reason;  // why not native; "" where it is
};
// On this machine. kEmulated: operands are quantised, and multiplied in fp32 (CPU) or BF16 (GPU).
RecipeReport recipe_report(Fp8Recipe recipe, Device device);
// On a GPU like this.
RecipeReport recipe_report(Fp8Recipe recipe, const DeviceInfo& gpu);

}  // namespace biomoe
