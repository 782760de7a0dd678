#include "apps/bench.h"
#include "biomoe/ops/device.h"
#include "biomoe/train/run_config.h"

namespace biomoe::apps {
namespace {

constexpr const char* kRow = "{:<20} {:<14} {:>10} {:>10} {:>12} {:>10}\n";

void print_row(const nlohmann::json& row, double baseline_ms) {
  const double ms = row["step_ms"].get<double>();
  fmt::print(kRow, row["expert_ffn_mode"].get<std::string>(), row["deterministic"].get<bool>() ? "yes" : "no",
             fmt::format("{:.2f}", ms), fmt::format("{:.2f}x", baseline_ms / ms),
             fmt::format("{:.0f}", row["tokens_per_s"].get<double>()),
             fmt::format("{:.1f}", row["gflops"].get<double>() * 1e-3));
}

}  // namespace

nlohmann::json bench_moe(BenchOptions options) {
  nlohmann::json rows = nlohmann::json::array();
  fmt::print(kRow, "expert_ffn_mode", "deterministic", "ms/step", "speed", "tokens/s", "TFLOP/s");
  const bool asked = options.deterministic;
  for (size_t i = 0; i < kExpertFfnModeNames.size(); ++i) {
    try {
      options.mode = resolved_expert_ffn_mode(static_cast<ExpertFfnChoice>(i + 1), options.device,
                                              options.model, options.portable_kernels);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUser) throw;
      fmt::print("{:<20} {}\n", kExpertFfnModeNames[i], error.what());
      continue;
    }
    rows.push_back(bench_step(options));
    print_row(rows.back(), rows.front()["step_ms"].get<double>());
  }
  nlohmann::json result = bench_header(options, "moe");
  // On the CPU the order of sums is always fixed.
  if (options.device != Device::kCpu && !asked) {
    options.mode = resolved_expert_ffn_mode(ExpertFfnChoice::kAuto, options.device, options.model,
                                            options.portable_kernels);
    options.deterministic = true;
    const nlohmann::json fixed = bench_step(options);
    print_row(fixed, rows.front()["step_ms"].get<double>());
    for (const auto& row : rows) {
      if (row["expert_ffn_mode"] != fixed["expert_ffn_mode"]) continue;
      const double cost = fixed["step_ms"].get<double>() / row["step_ms"].get<double>() - 1.0;
      fmt::print("deterministic=true costs {:.1f} % of a step\n", 100.0 * cost);
      result["deterministic_cost"] = cost;
    }
    rows.push_back(fixed);
  }
  result["rows"] = rows;
  if (options.device == Device::kCuda && device_info(options.device).compute_capability == 90 &&
      !options.portable_kernels) {
    result["products"] = bench_expert_products(options);
  }
  return result;
}

}  // namespace biomoe::apps
