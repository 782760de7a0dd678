// Checks the Hopper grouped GEMM kernels against plain references, then times them at the geometry of Mixtral
// 8x7B beside dense products of the same size with cuBLASLt.
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -I. -lcublasLt -o sm90_grouped_gemm_bench
//     bench/cuda/sm90_grouped_gemm_bench.cu biomoe/backend/cuda/gemm/sm90_*.cu      (one line)
//   sm90_grouped_gemm_bench [--check] [--time]      both by default; exit status 1 if a check failed
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/cuda/grouped_gemm_data.cuh"
#include "bench/cuda/grouped_gemm_timing.cuh"

namespace bench {
namespace {

// Collects the verdicts of one kernel over all cases.
class Verdict {
 public:
  explicit Verdict(std::string name) : name_(std::move(name)) {}

  // `norm_limit`: bound of the relative error in norm.
  void add(const char* where, const char* what, const Comparison& c, double norm_limit) {
    const double norm = c.reference2 > 0 ? std::sqrt(c.error2 / c.reference2) : std::sqrt(c.error2);
    const bool good = c.bad == 0 && norm <= norm_limit;
    ++checks_;
    worst_ = std::max(worst_, c.worst);
    norm_ = std::max(norm_, norm);
    if (good) return;
    if (++failures_ <= 6) {
      std::printf("FAIL %s, %s, %s: %llu of %llu bad, worst %.3g tolerances, norm %.3g\n", name_.c_str(),
                  where, what, c.bad, c.count, c.worst, norm);
    }
  }
  void print() const {
    std::printf("%-34s %s  %4d checks, max error %.3f tolerances, norm %.3g\n", name_.c_str(),
                failures_ ? "FAIL" : "PASS", checks_, worst_, norm_);
  }
  bool failed() const { return failures_ > 0; }

 private:
  std::string name_;
  int checks_ = 0, failures_ = 0;
  double worst_ = 0, norm_ = 0;
};

constexpr double kNormBf16 = kUnitBf16;
constexpr double kNormFp32 = 1e-5;

class ComparisonResult {
 public:
  ComparisonResult() : array_(1) { BENCH_CUDA(cudaMemset(array_.get(), 0, sizeof(Comparison))); }
  Comparison* get() const { return array_.get(); }
  Comparison read() const {
    Comparison host;
    BENCH_CUDA(cudaMemcpy(&host, array_.get(), sizeof(host), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  DeviceArray<Comparison> array_;
};

template <typename T>
Comparison compare_product(const Product& product, const T* out, const T* before, int64_t samples) {
  ComparisonResult result;
  compare_product_kernel<T><<<kGrid, kBlock>>>(product, out, before, samples, result.get());
  return result.read();
}

void run(const GroupedGemmPlan& plan, const char* what) {
  BENCH_CUDA(plan.launch(nullptr));
  const cudaError_t status = cudaDeviceSynchronize();
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Verdicts {
  Verdict forward{"forward"}, gate_up{"gate_up"}, act{"act"}, act_bits{"act, bitwise as unfused"},
      dgrad{"dgrad"}, dgate_up{"down dgrad, dgate_up"}, dprob{"down dgrad, dprob"}, wgrad{"wgrad"},
      wgrad_add{"wgrad += BF16"}, wgrad_fp32{"wgrad += FP32"}, squares{"wgrad, square sums"};

  bool print() const {
    bool failed = false;
    for (const Verdict* v : {&forward, &gate_up, &act, &act_bits, &dgrad, &dgate_up, &dprob, &wgrad,
                             &wgrad_add, &wgrad_fp32, &squares}) {
      v->print();
      failed = failed || v->failed();
    }
    return failed;
  }
};

struct Case {
  std::string name;
  std::vector<int> counts;
  int64_t in, out, features;
  int64_t samples = int64_t{1} << 40;
};

// Everything one case needs; outputs are poisoned before each run.
class CaseRunner {
 public:
  explicit CaseRunner(const Case& c)
      : c_(c),
        rows_(c.counts, 256),
        x_(rows_.activations(c.in, 1)),
        dy_(rows_.activations(c.out, 2)),
        h_(rows_.activations(2 * c.features, 3)),
        prob_(rows_.probs(4)),
        w_(random_weights(rows_.experts * c.out * c.in, 1.0f / std::sqrt(static_cast<float>(c.in)), 5)),
        w_gate_up_(random_weights(rows_.experts * 2 * c.features * c.in,
                                  1.5f / std::sqrt(static_cast<float>(c.in)), 6)),
        w_down_(random_weights(rows_.experts * c.out * c.features,
                               1.0f / std::sqrt(static_cast<float>(c.out)), 7)) {}

  void check(const Tiling& tiling, const char* tiling_name, Verdicts* verdicts) {
    where_ = c_.name + ", " + tiling_name;
    check_forward(tiling, verdicts);
    check_dgrad(tiling, verdicts);
    if (tiling.split) return;  // the others are not split
    check_gate_up(tiling, verdicts);
    check_down_dgrad(tiling, verdicts);
    check_wgrad(tiling, verdicts);
    check_wgrad_add<Bf16>(tiling, sm90::GradientType::kBf16, kNormBf16, &verdicts->wgrad_add);
    check_wgrad_add<float>(tiling, sm90::GradientType::kFp32, kNormFp32, &verdicts->wgrad_fp32);
  }

 private:
  void check_forward(const Tiling& tiling, Verdicts* verdicts) {
    DeviceArray<Bf16> y(rows_.capacity * c_.out);
    y.poison();
    const sm90::ForwardProblem problem{rows_.expert_rows(),   c_.in, c_.out, x_->get(), w_->get(), y.get(),
                                       workspace_.bytes.get()};
    run(plan_for(problem, tiling), "forward");
    const Product product{Form::kForward, x_->get(), w_->get(),      rows_.capacity,
                          c_.out,         c_.in,     rows_.routing()};
    verdicts->forward.add(where_.c_str(), "y", compare_product<Bf16>(product, y.get(), nullptr, c_.samples),
                          kNormBf16);
  }

  void check_gate_up(const Tiling& tiling, Verdicts* verdicts) {
    DeviceArray<Bf16> gate_up(rows_.capacity * 2 * c_.features), act(rows_.capacity * c_.features);
    gate_up.poison();
    act.poison();
    const sm90::GateUpProblem problem{rows_.expert_rows(), c_.in,        c_.features,   x_->get(),
                                      w_gate_up_->get(),   prob_->get(), gate_up.get(), act.get()};
    run(plan_for(problem, tiling), "gate_up");
    const Product product{Form::kForward,  x_->get(), w_gate_up_->get(), rows_.capacity,
                          2 * c_.features, c_.in,     rows_.routing()};
    verdicts->gate_up.add(where_.c_str(), "gate_up",
                          compare_product<Bf16>(product, gate_up.get(), nullptr, c_.samples), kNormBf16);
    ComparisonResult result;
    DeviceArray<unsigned long long> differences(1);
    BENCH_CUDA(cudaMemset(differences.get(), 0, 8));
    compare_act_kernel<<<kGrid, kBlock>>>(gate_up.get(), prob_->get(), act.get(), rows_.routing(),
                                          c_.features, result.get(), differences.get());
    verdicts->act.add(where_.c_str(), "act", result.read(), kNormBf16);
    Comparison bits;
    BENCH_CUDA(cudaMemcpy(&bits.bad, differences.get(), 8, cudaMemcpyDeviceToHost));
    verdicts->act_bits.add(where_.c_str(), "act", bits, 0);
  }

  void check_dgrad(const Tiling& tiling, Verdicts* verdicts) {
    DeviceArray<Bf16> dx(rows_.capacity * c_.in);
    dx.poison();
    const sm90::DgradProblem problem{rows_.expert_rows(),   c_.in, c_.out, dy_->get(), w_->get(), dx.get(),
                                     workspace_.bytes.get()};
    run(plan_for(problem, tiling), "dgrad");
    const Product product{Form::kDgrad, dy_->get(), w_->get(),      rows_.capacity,
                          c_.in,        c_.out,     rows_.routing()};
    verdicts->dgrad.add(where_.c_str(), "dx", compare_product<Bf16>(product, dx.get(), nullptr, c_.samples),
                        kNormBf16);
  }

  // In place, from the dact that the plain kernel computes.
  void check_down_dgrad(const Tiling& tiling, Verdicts* verdicts) {
    DeviceArray<Bf16> dact(rows_.capacity * c_.features), dgate_up(rows_.capacity * 2 * c_.features);
    const sm90::DgradProblem plain{
        rows_.expert_rows(), c_.features,           c_.out, dy_->get(), w_down_->get(),
        dact.get(),          workspace_.bytes.get()};
    run(plan_for(plain, tiling), "dgrad");
    dgate_up.copy_from(*h_);
    DeviceArray<float> dprob(rows_.capacity);
    sm90::DownDgradProblem problem{
        rows_.expert_rows(), c_.features,  c_.out,         dy_->get(), w_down_->get(),
        dgate_up.get(),      prob_->get(), dgate_up.get(), nullptr,    dprob.get()};
    DeviceArray<float> partials(dprob_partials_count(problem));
    partials.poison();
    dprob.poison();
    problem.dprob_partials = partials.get();
    run(plan_for(problem, tiling), "down dgrad");
    ComparisonResult gradients, probs;
    compare_swiglu_gradient_kernel<<<kGrid, kBlock>>>(dact.get(), h_->get(), prob_->get(), dgate_up.get(),
                                                      dprob.get(), rows_.routing(), c_.features,
                                                      gradients.get(), probs.get());
    verdicts->dgate_up.add(where_.c_str(), "dgate_up", gradients.read(), kNormBf16);
    verdicts->dprob.add(where_.c_str(), "dprob", probs.read(), kNormFp32);
  }

  Product wgrad_product() const {
    return {Form::kWgrad, dy_->get(), x_->get(), c_.out, c_.in, 0, rows_.routing()};
  }

  void check_wgrad(const Tiling& tiling, Verdicts* verdicts) {
    DeviceArray<Bf16> dw(rows_.experts * c_.out * c_.in);
    dw.poison();
    sm90::WgradProblem problem{rows_.expert_rows(), c_.in, c_.out, dy_->get(), x_->get(), dw.get()};
    DeviceArray<float> squares(wgrad_square_sums_count(problem));
    squares.poison();
    problem.square_sums = squares.get();
    run(plan_for(problem, tiling), "wgrad");
    verdicts->wgrad.add(where_.c_str(), "dw",
                        compare_product<Bf16>(wgrad_product(), dw.get(), nullptr, c_.samples), kNormBf16);
    ComparisonResult result;
    compare_square_sums_kernel<<<static_cast<unsigned>(squares.count()), kBlock>>>(
        dw.get(), squares.get(), c_.out, c_.in, sm90::kTileColumns, result.get());
    verdicts->squares.add(where_.c_str(), "square sums", result.read(), kNormFp32);
  }

  template <typename T>
  void check_wgrad_add(const Tiling& tiling, sm90::GradientType type, double norm_limit, Verdict* verdict) {
    DeviceArray<T> before(rows_.experts * c_.out * c_.in), dw(before.count());
    fill_normal_kernel<<<kGrid, kBlock>>>(before.get(), before.count(), 3.0f, 8);
    dw.copy_from(before);
    sm90::WgradProblem problem{rows_.expert_rows(), c_.in,    c_.out, dy_->get(),
                               x_->get(),           dw.get(), type,   true};
    run(plan_for(problem, tiling), "wgrad add");
    verdict->add(where_.c_str(), "dw",
                 compare_product<T>(wgrad_product(), dw.get(), before.get(), c_.samples), norm_limit);
  }

  Case c_;
  std::string where_;
  Rows rows_;
  SplitWorkspace workspace_;
  std::unique_ptr<DeviceArray<Bf16>> x_, dy_, h_;
  std::unique_ptr<DeviceArray<float>> prob_;
  std::unique_ptr<DeviceArray<Bf16>> w_, w_gate_up_, w_down_;
};

std::vector<Case> check_cases() {
  std::vector<int> one_of_five{0, 0, 700, 0, 0};
  std::vector<int> many = random_counts(300, 4, 64, 3);
  return {
      {"uniform 8 experts", random_counts(600, 2, 8, 1), 512, 384, 256},
      {"one expert", {640}, 256, 512, 128},
      {"all rows to one of five", one_of_five, 320, 256, 96},
      {"0, 1, 127, 128, 129, 64, 65, 0 rows", {0, 1, 127, 128, 129, 64, 65, 0}, 200, 136, 160},
      {"no rows at all", {0, 0, 0}, 64, 64, 32},
      {"64 experts", many, 136, 72, 64},
      {"widths of 8", {3, 200, 0, 130}, 8, 8, 32},
      {"widths of 8 odd", {300, 129}, 1032, 776, 288},
      {"few rows, long sums", {130, 60}, 4096, 4160, 64, 400000},
      {"more units than blocks", {2500, 130, 1, 4000}, 768, 1160, 544, 400000},
  };
}

bool check_all() {
  Verdicts verdicts;
  for (const Case& c : check_cases()) {
    CaseRunner runner(c);
    for (int t = 0; t < kTilingCount; ++t) runner.check(kTilings[t], kTilingNames[t], &verdicts);
  }
  {
    const Case mixtral{"Mixtral, sampled", random_counts(4096, 2, 8, 5), 4096, 4096, 14336, 20000};
    CaseRunner runner(mixtral);
    for (int t = 0; t < kTilingCount; ++t) runner.check(kTilings[t], kTilingNames[t], &verdicts);
  }
  return verdicts.print();
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  bool check = argc == 1, time = argc == 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--check") == 0) {
      check = true;
    } else if (std::strcmp(argv[i], "--time") == 0) {
      time = true;
    } else {
      std::fprintf(stderr, "usage: %s [--check] [--time]\n", argv[0]);
      return 2;
    }
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  cudaDeviceProp properties{};
  BENCH_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d multiprocessors\n", properties.name, properties.multiProcessorCount);
  const bool failed = check && bench::check_all();
  if (time) bench::time_all();
  return failed ? 1 : 0;
}
