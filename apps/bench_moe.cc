#include <algorithm>
#include <optional>

#include "apps/bench.h"
#include "biomoe/ops/device.h"
#include "biomoe/train/run_config.h"

namespace biomoe::apps {
namespace {

constexpr const char* kRow = "{:<20} {:<30} {:<14} {:>10} {:>10} {:>12} {:>10}\n";

std::string text_of(const nlohmann::json& row, const char* key) {
  return row[key].get<std::string>();
}

double ms_of(const nlohmann::json& row) {
  return row["step_ms"].get<double>();
}

// The type that experts compute in, or the recipe and whether its codes are multiplied as such.
std::string precision_of(const BenchOptions& options, const nlohmann::json& row) {
  if (!options.fp8.enabled) return options.device == Device::kCpu ? "fp32" : "bf16";
  const bool native = text_of(row, "fp8").find(" native") != std::string::npos;
  return fmt::format("{} {}", kFp8RecipeNames[static_cast<size_t>(options.fp8.fp8_recipe)],
                     native ? "native" : "emulated");
}

// Rows as they are measured, each printed with its speed over that of the loop over experts. Nothing is
// printed before there is a row.
class Table {
 public:
  // A choice that the device or the sizes have nothing for is a line that says so; gives the row's number
  // otherwise.
  std::optional<size_t> measure(BenchOptions options, ExpertFfnChoice mode) {
    const std::string name(kExpertFfnChoiceNames[static_cast<size_t>(mode)]);
    nlohmann::json row;
    try {
      options.mode = resolved_expert_ffn_mode(mode, options.device, options.model, options.fp8,
                                              options.portable_kernels);
      row = bench_step(options);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUser) throw;
      if (!first_refusal_) first_refusal_ = error;
      refused_ += fmt::format("{:<20} {}\n", name, error.what());
      if (!rows.empty()) print_refused();
      return std::nullopt;
    }
    if (rows.empty()) {
      fmt::print(kRow, "expert_ffn_mode", "precision", "deterministic", "ms/step", "over loop", "tokens/s",
                 "TFLOP/s");
      print_refused();
    }
    row["precision"] = precision_of(options, row);
    if (text_of(row, "expert_ffn_mode") == kExpertFfnModeNames[0] && !loop_ms_) loop_ms_ = ms_of(row);
    fmt::print(kRow, text_of(row, "expert_ffn_mode"), text_of(row, "precision"),
               row["deterministic"].get<bool>() ? "yes" : "no", fmt::format("{:.2f}", ms_of(row)),
               loop_ms_ ? fmt::format("{:.2f}x", *loop_ms_ / ms_of(row)) : "",
               fmt::format("{:.0f}", row["tokens_per_s"].get<double>()),
               fmt::format("{:.1f}", row["gflops"].get<double>() * 1e-3));
    rows.push_back(row);
    return rows.size() - 1;
  }

  void require_rows() const {
    if (rows.empty()) throw *first_refusal_;
  }

  nlohmann::json rows = nlohmann::json::array();

 private:
  void print_refused() {
    fmt::print("{}", refused_);
    refused_.clear();
  }

  std::optional<double> loop_ms_;
  std::optional<Error> first_refusal_;
  std::string refused_;  // lines that are not printed yet
};

// Says of each recipe what it gains or costs beside the fastest row without one, at these sizes.
nlohmann::json compare_recipes(const BenchOptions& options, const Table& table,
                               const std::vector<size_t>& wide, const std::vector<size_t>& coded) {
  nlohmann::json costs = nlohmann::json::object();
  const auto faster = [&](size_t a, size_t b) { return ms_of(table.rows[a]) < ms_of(table.rows[b]); };
  if (wide.empty()) return costs;
  const nlohmann::json& best = table.rows[*std::min_element(wide.begin(), wide.end(), faster)];
  for (const size_t i : coded) {
    const nlohmann::json& row = table.rows[i];
    const double cost = ms_of(row) / ms_of(best) - 1.0;
    fmt::print("{} {} {:.1f} % of a step beside {} in {}, at hidden {}, ffn {}, {} experts, {} tokens{}\n",
               text_of(row, "precision"), cost > 0 ? "costs" : "saves", 100.0 * std::abs(cost),
               text_of(best, "expert_ffn_mode"), text_of(best, "precision"), options.model.hidden_size,
               options.model.intermediate_size, options.model.num_local_experts, options.seq * options.batch,
               cost > 0 ? ": slower here, leave fp8_config.enabled=false" : "");
    costs[text_of(row, "precision")] = cost;
  }
  return costs;
}

}  // namespace

nlohmann::json bench_moe(BenchOptions options) {
  nlohmann::json result = bench_header(options, "moe");
  Table table;
  std::vector<size_t> wide, coded;
  for (size_t i = 0; i < kExpertFfnModeNames.size(); ++i) {
    const auto row = table.measure(options, static_cast<ExpertFfnChoice>(i + 1));
    if (row) wide.push_back(*row);
  }
  if (!options.fp8.enabled) {
    for (const Fp8Recipe recipe : {Fp8Recipe::kFloat8BlockScaling, Fp8Recipe::kMxfp8BlockScaling}) {
      BenchOptions with_recipe = options;
      with_recipe.fp8.enabled = true;
      with_recipe.fp8.fp8_recipe = recipe;
      const auto row = table.measure(with_recipe, ExpertFfnChoice::kAuto);
      if (row) coded.push_back(*row);
    }
  }
  // On the CPU the order of sums is always fixed.
  if (options.device != Device::kCpu && !options.deterministic) {
    BenchOptions fixed = options;
    fixed.deterministic = true;
    if (const auto row = table.measure(fixed, ExpertFfnChoice::kAuto)) {
      for (const size_t other : wide) {
        if (table.rows[other]["expert_ffn_mode"] != table.rows[*row]["expert_ffn_mode"]) continue;
        const double cost = ms_of(table.rows[*row]) / ms_of(table.rows[other]) - 1.0;
        fmt::print("deterministic=true costs {:.1f} % of a step\n", 100.0 * cost);
        result["deterministic_cost"] = cost;
      }
    }
  }
  table.require_rows();
  result["recipe_costs"] = compare_recipes(options, table, wide, coded);
  result["rows"] = table.rows;
  if (options.device == Device::kCuda && device_info(options.device).compute_capability == 90 &&
      !options.portable_kernels) {
    result["products"] = bench_expert_products(options);
  }
  return result;
}

}  // namespace biomoe::apps
