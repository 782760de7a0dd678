#include <algorithm>
#include <cstring>

#include "apps/bench_op_cases.h"
#include "biomoe/core/clock.h"

namespace biomoe::apps {
namespace {

struct Timing {
  int64_t warmup = 0, samples = 1;
};

// Median seconds of one call; a sample of short calls is a millisecond of them.
template <typename Run>
double median_seconds(const Timing& timing, const Run& run) {
  constexpr double kSampleSeconds = 1e-3;
  for (int64_t i = 0; i < timing.warmup; ++i) run();
  double begin = now_seconds();
  run();
  const double once = std::max(now_seconds() - begin, 1e-9);
  const auto calls = static_cast<int64_t>(std::clamp(kSampleSeconds / once, 1.0, 1e5));
  std::vector<double> seconds;
  for (int64_t sample = 0; sample < timing.samples; ++sample) {
    begin = now_seconds();
    for (int64_t call = 0; call < calls; ++call) run();
    seconds.push_back((now_seconds() - begin) / static_cast<double>(calls));
  }
  return median_of(seconds);
}

// What no operation that reads its operands from memory can beat.
struct Ceilings {
  double copy = 0;   // bytes read and written a second by copying between arrays that no cache holds
  double sgemm = 0;  // operations a second of a large square product
};

constexpr int64_t kCopyBytes = int64_t{256} << 20;
constexpr int64_t kGemmSize = 2048;

// Of the operations or, where it has more, of the copy, whose arrays are gone before those are made.
RunMemory plan_memory(const BenchOptions& options) {
  RunMemory memory = OpBench::plan_memory(options);
  const RunMemory copy{.rows = {{"arrays of the copy benchmark", 2 * kCopyBytes, ""}, memory.rows.back()}};
  return copy.total() > memory.total() ? copy : memory;
}

double copy_bandwidth(const Context& ctx, const Timing& timing) {
  Arena arena(2 * kCopyBytes, "the arrays of the copy benchmark");
  auto* from = static_cast<char*>(arena.allocate(kCopyBytes));
  auto* to = static_cast<char*>(arena.allocate(kCopyBytes));
  const int threads = ctx.num_threads;
  const auto parts = [&](const auto& body) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; ++part) {
      const int64_t begin = kCopyBytes * part / threads, end = kCopyBytes * (part + 1) / threads;
      body(begin, static_cast<size_t>(end - begin));
    }
  };
  parts([&](int64_t begin, size_t count) { std::memset(from + begin, 1, count); });
  const double seconds = median_seconds(timing, [&] {
    parts([&](int64_t begin, size_t count) { std::memcpy(to + begin, from + begin, count); });
  });
  return 2.0 * static_cast<double>(kCopyBytes) / seconds;
}

double gemm_rate(Context& ctx, const Timing& timing) {
  const Shape shape{kGemmSize, kGemmSize};
  Arena arena(3 * align_up(kGemmSize * kGemmSize * sizeof(float)), "the operands of the sgemm benchmark");
  const TensorView a = arena.tensor(DType::kF32, shape), b = arena.tensor(DType::kF32, shape),
                   c = arena.tensor(DType::kF32, shape);
  std::fill_n(a.f32(), a.num_elements(), 0.5f);
  std::fill_n(b.f32(), b.num_elements(), 0.25f);
  const double seconds =
      median_seconds(timing, [&] { gemm(ctx, {.a = a, .b = b, .c = c, .transpose_b = true}); });
  return 2.0 * static_cast<double>(kGemmSize * kGemmSize * kGemmSize) / seconds;
}

Ceilings measure_ceilings(const BenchOptions& options, const Timing& timing) {
  Context ctx;
  ctx.num_threads = resolved_threads(options.num_threads);
  return {.copy = copy_bandwidth(ctx, timing), .sgemm = gemm_rate(ctx, timing)};
}

void print_row(const OpCase& op, const nlohmann::json& row) {
  const std::string name = op.what.empty() ? std::string(op.op) : fmt::format("{}, {}", op.op, op.what);
  fmt::print("{:<38} {:>11.1f} {:>9.1f} {:>9.1f}  {:<8} {:>6.0f} %\n", name, row["median_us"].get<double>(),
             row["gflops"].get<double>(), row["gb_per_s"].get<double>(), row["bound"].get<std::string>(),
             100 * row["of_roofline"].get<double>());
}

nlohmann::json row_of(const OpCase& op, const Ceilings& ceilings, double seconds) {
  const double arithmetic = op.flops / ceilings.sgemm, traffic = op.bytes / ceilings.copy;
  return {{"op", op.op},
          {"case", op.what},
          {"median_us", seconds * 1e6},
          {"flops", op.flops},
          {"bytes", op.bytes},
          {"gflops", op.flops / seconds * 1e-9},
          {"gb_per_s", op.bytes / seconds * 1e-9},
          {"bound", arithmetic > traffic ? "compute" : "memory"},
          {"of_roofline", std::max(arithmetic, traffic) / seconds}};
}

}  // namespace

nlohmann::json bench_ops(const BenchOptions& options) {
  const RunMemory memory = plan_memory(options);
  require_memory_here(memory, 1);
  const Timing timing{options.warmup, options.steps};
  const Ceilings ceilings = measure_ceilings(options, timing);
  OpBench bench(options);
  Context& ctx = bench.context();
  nlohmann::json result = bench_header(options, "ops");
  result["ceilings"] = {{"copy_gb_per_s", ceilings.copy * 1e-9},
                        {"copy_bytes", kCopyBytes},
                        {"sgemm_gflops", ceilings.sgemm * 1e-9},
                        {"sgemm_size", kGemmSize}};
  fmt::print("{} threads; ceilings: copy {:.1f} GB/s, sgemm of {} {:.1f} GFLOP/s\n", ctx.num_threads,
             ceilings.copy * 1e-9, kGemmSize, ceilings.sgemm * 1e-9);
  fmt::print("{:<38} {:>11} {:>9} {:>9}  {:<8} {:>8}\n", "", "median us", "GFLOP/s", "GB/s", "bound",
             "roofline");
  nlohmann::json rows = nlohmann::json::array();
  for (const OpCase& op : bench.cases()) {
    rows.push_back(row_of(op, ceilings, median_seconds(timing, [&] { op.run(ctx); })));
    print_row(op, rows.back());
  }
  fmt::print("above 100 %: operands that stay in the caches\n");
  result["ops"] = rows;
  result["memory_planned_bytes"] = memory.total();
  return result;
}

}  // namespace biomoe::apps
