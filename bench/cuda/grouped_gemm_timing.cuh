// Times the grouped GEMM kernels at the geometry of Mixtral 8x7B, with random rows and weights, and dense
// products of as many rows with cuBLASLt. TFLOP/s count real rows only.
#pragma once

#include <cublasLt.h>

#include <functional>
#include <string>

#include "bench/cuda/grouped_gemm_data.cuh"

#define BENCH_CUBLAS(call)                                                                     \
  do {                                                                                         \
    const cublasStatus_t status_ = (call);                                                     \
    if (status_ != CUBLAS_STATUS_SUCCESS) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: status %d\n", __FILE__, __LINE__, #call, int(status_)); \
      std::exit(1);                                                                            \
    }                                                                                          \
  } while (false)

namespace bench {

// Clock and time of every multiprocessor; a block of this size leaves room for no other beside it.
constexpr int kProbeBytes = 200 * 1024;
constexpr int kMaxMultiprocessors = 256;
struct ClockReading {
  long long clock[kMaxMultiprocessors], time[kMaxMultiprocessors];
};
__global__ void read_clocks_kernel(ClockReading* reading) {
  unsigned multiprocessor;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  if (multiprocessor >= kMaxMultiprocessors) return;
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  reading->clock[multiprocessor] = clock64();
  reading->time[multiprocessor] = time;
}

struct Timing {
  double ms;         // median time of one call
  double megahertz;  // mean clock over the calls
};

// The clock of a card at its power limit follows what ran some tenths of a second before.
constexpr double kSettleMs = 400, kTimedMs = 100;

// Times calls in a row after kSettleMs of the same: what a training step sees of a card that its power limit
// holds back.
class Timer {
 public:
  Timer() : readings_(2) {
    BENCH_CUDA(
        cudaFuncSetAttribute(read_clocks_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kProbeBytes));
  }

  Timing measure(const std::function<void()>& call) {
    const double first = median_ms(call, 3, nullptr);
    median_ms(call, std::max(5, static_cast<int>(kSettleMs / first)), nullptr);
    double megahertz = 0;
    const double ms = median_ms(call, std::max(5, static_cast<int>(kTimedMs / first)), &megahertz);
    return {ms, megahertz};
  }

 private:
  void read_clocks(int which) {
    BENCH_CUDA(cudaMemsetAsync(readings_.get() + which, 0, sizeof(ClockReading)));
    read_clocks_kernel<<<132, 1, kProbeBytes>>>(readings_.get() + which);
  }

  double median_ms(const std::function<void()>& call, int repeats, double* megahertz) {
    std::vector<cudaEvent_t> events(static_cast<size_t>(repeats) + 1);
    for (cudaEvent_t& event : events) BENCH_CUDA(cudaEventCreate(&event));
    if (megahertz != nullptr) read_clocks(0);
    BENCH_CUDA(cudaEventRecord(events[0]));
    for (int i = 0; i < repeats; ++i) {
      call();
      BENCH_CUDA(cudaEventRecord(events[static_cast<size_t>(i) + 1]));
    }
    if (megahertz != nullptr) read_clocks(1);
    BENCH_CUDA(cudaDeviceSynchronize());
    if (megahertz != nullptr) *megahertz = mean_megahertz();
    std::vector<float> times(static_cast<size_t>(repeats));
    for (size_t i = 0; i < times.size(); ++i)
      BENCH_CUDA(cudaEventElapsedTime(&times[i], events[i], events[i + 1]));
    for (cudaEvent_t event : events) cudaEventDestroy(event);
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    return times[static_cast<size_t>(repeats) / 2];
  }

  double mean_megahertz() {
    std::vector<ClockReading> host(2);
    BENCH_CUDA(cudaMemcpy(host.data(), readings_.get(), 2 * sizeof(ClockReading), cudaMemcpyDeviceToHost));
    double sum = 0;
    int count = 0;
    for (int i = 0; i < kMaxMultiprocessors; ++i) {
      if (host[0].time[i] == 0 || host[1].time[i] == 0) continue;
      sum += 1000.0 * static_cast<double>(host[1].clock[i] - host[0].clock[i]) /
             static_cast<double>(host[1].time[i] - host[0].time[i]);
      ++count;
    }
    return count > 0 ? sum / count : 0;
  }

  DeviceArray<ClockReading> readings_;
};

// out[m, n] = a b for row-major matrices as the form has them, dense: the best of cuBLASLt's first
// suggestions.
class DenseGemm {
 public:
  DenseGemm() : workspace_(int64_t{64} << 20) { BENCH_CUBLAS(cublasLtCreate(&handle_)); }
  ~DenseGemm() { cublasLtDestroy(handle_); }

  Timing best(Timer& timer, Form form, int64_t m, int64_t n, int64_t k, const Bf16* a, const Bf16* b,
              Bf16* out) {
    // In cuBLAS's column-major terms this is out^T = b^T a^T.
    cublasLtMatmulDesc_t operation;
    BENCH_CUBLAS(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t trans_b = form == Form::kForward ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t trans_a = form == Form::kWgrad ? CUBLAS_OP_T : CUBLAS_OP_N;
    BENCH_CUBLAS(
        cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &trans_b, sizeof(trans_b)));
    BENCH_CUBLAS(
        cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &trans_a, sizeof(trans_a)));
    cublasLtMatrixLayout_t layout_b, layout_a, layout_out;
    const auto layout = [](cublasLtMatrixLayout_t* l, int64_t rows, int64_t columns) {
      BENCH_CUBLAS(cublasLtMatrixLayoutCreate(l, CUDA_R_16BF, static_cast<uint64_t>(rows),
                                              static_cast<uint64_t>(columns), rows));
    };
    layout(&layout_b, form == Form::kForward ? k : n, form == Form::kForward ? n : k);
    layout(&layout_a, form == Form::kWgrad ? m : k, form == Form::kWgrad ? k : m);
    layout(&layout_out, n, m);
    cublasLtMatmulPreference_t preference;
    const uint64_t bytes = static_cast<uint64_t>(workspace_.count());
    BENCH_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
    BENCH_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &bytes, sizeof(bytes)));
    cublasLtMatmulHeuristicResult_t found[4];
    int count = 0;
    BENCH_CUBLAS(cublasLtMatmulAlgoGetHeuristic(handle_, operation, layout_b, layout_a, layout_out,
                                                layout_out, preference, 4, found, &count));
    const float one = 1.0f, zero = 0.0f;
    Timing best{1e30, 0};
    for (int i = 0; i < count; ++i) {
      const Timing timing = timer.measure([&] {
        BENCH_CUBLAS(cublasLtMatmul(handle_, operation, &one, b, layout_b, a, layout_a, &zero, out,
                                    layout_out, out, layout_out, &found[i].algo, workspace_.get(), bytes,
                                    nullptr));
      });
      if (timing.ms < best.ms) best = timing;
    }
    cublasLtMatmulPreferenceDestroy(preference);
    for (cublasLtMatrixLayout_t l : {layout_a, layout_b, layout_out}) cublasLtMatrixLayoutDestroy(l);
    cublasLtMatmulDescDestroy(operation);
    return best;
  }

 private:
  DeviceArray<uint8_t> workspace_;
  cublasLtHandle_t handle_ = nullptr;
};

constexpr int64_t kWidth = 4096, kFeatures = 14336;
constexpr int kExperts = 8;

// Buffers of one expert layer, forward and backward.
struct Layer {
  Layer(const std::vector<int>& counts)
      : rows(counts, 128),
        x(rows.activations(kWidth, 1)),
        y(rows.activations(kWidth, 2)),
        gate_up(rows.activations(2 * kFeatures, 3)),
        gate_up_out(rows.activations(2 * kFeatures, 4)),
        act(rows.activations(kFeatures, 5)),
        prob(rows.probs(6)),
        dprob(rows.capacity),
        partials(rows.capacity * kFeatures / sm90::kTileColumns),
        w_gate_up(random_weights(kExperts * 2 * kFeatures * kWidth, 0.02f, 7)),
        w_down(random_weights(kExperts * kFeatures * kWidth, 0.01f, 8)),
        row_codes(rows.capacity * 2 * kFeatures, 1.0f),
        weight_codes(kExperts * 2 * kFeatures * kWidth, 0.02f),
        dw(kExperts * 2 * kFeatures * kWidth),
        dw_fp32(kExperts * 2 * kFeatures * kWidth) {
    BENCH_CUDA(cudaMemset(dw_fp32.get(), 0, static_cast<size_t>(dw_fp32.count()) * 4));
  }

  Rows rows;
  SplitWorkspace workspace;
  std::unique_ptr<DeviceArray<Bf16>> x, y, gate_up, gate_up_out, act;
  std::unique_ptr<DeviceArray<float>> prob;
  DeviceArray<float> dprob, partials;
  std::unique_ptr<DeviceArray<Bf16>> w_gate_up, w_down;
  RandomCodes row_codes, weight_codes;  // those of every product of codes
  DeviceArray<Bf16> dw;
  DeviceArray<float> dw_fp32;
};

struct TimedProduct {
  const char* name;
  std::function<GroupedGemmPlan(const Tiling&)> plan;
  double flop;
  std::function<Timing(DenseGemm&, Timer&)> dense;  // null: none
  double dense_flop;
  bool splits = false;
  bool fp8 = false;
};

// The products of codes.
inline std::vector<TimedProduct> timed_code_products(Layer& l) {
  const sm90::ExpertRows rows = l.rows.expert_rows();
  const double gate_up_flop = 2.0 * static_cast<double>(l.rows.valid) * kWidth * 2 * kFeatures,
               down_flop = gate_up_flop / 2;
  const auto codes = [&](int64_t n, int64_t k) {
    return fp8_operands(l.row_codes, l.rows.capacity, l.weight_codes, n, k);
  };
  const auto product = [&](const char* name, auto problem, double flop, bool splits) {
    return TimedProduct{name, [=](const Tiling& t) { return plan_for(problem, t); }, flop, nullptr, 0, splits,
                        true};
  };
  return {
      product("fp8 gate_up",
              sm90::ForwardProblem{.rows = rows,
                                   .in = kWidth,
                                   .out = 2 * kFeatures,
                                   .y = l.gate_up_out->get(),
                                   .workspace = l.workspace.bytes.get(),
                                   .fp8 = codes(2 * kFeatures, kWidth)},
              gate_up_flop, true),
      product("fp8 down",
              sm90::ForwardProblem{.rows = rows,
                                   .in = kFeatures,
                                   .out = kWidth,
                                   .y = l.y->get(),
                                   .workspace = l.workspace.bytes.get(),
                                   .fp8 = codes(kWidth, kFeatures)},
              down_flop, true),
      product("fp8 down dgrad",
              sm90::DgradProblem{.rows = rows,
                                 .in = kFeatures,
                                 .out = kWidth,
                                 .dx = l.act->get(),
                                 .workspace = l.workspace.bytes.get(),
                                 .fp8 = codes(kFeatures, kWidth)},
              down_flop, true),
      product("fp8 gate_up dgrad",
              sm90::DgradProblem{.rows = rows,
                                 .in = kWidth,
                                 .out = 2 * kFeatures,
                                 .dx = l.y->get(),
                                 .workspace = l.workspace.bytes.get(),
                                 .fp8 = codes(kWidth, 2 * kFeatures)},
              gate_up_flop, true),
      product("fp8 gate_up wgrad",
              sm90::WgradProblem{.rows = rows,
                                 .in = kWidth,
                                 .out = 2 * kFeatures,
                                 .dw = l.dw.get(),
                                 .fp8 = fp8_columns(l.row_codes, l.row_codes)},
              gate_up_flop, false),
      product("fp8 down wgrad",
              sm90::WgradProblem{.rows = rows,
                                 .in = kFeatures,
                                 .out = kWidth,
                                 .dw = l.dw.get(),
                                 .fp8 = fp8_columns(l.row_codes, l.row_codes)},
              down_flop, false),
  };
}

inline std::vector<TimedProduct> timed_products(Layer& l) {
  const sm90::ExpertRows rows = l.rows.expert_rows();
  const int64_t m = l.rows.valid, per_expert = m / kExperts;
  const double gate_up_flop = 2.0 * static_cast<double>(m) * kWidth * 2 * kFeatures,
               down_flop = gate_up_flop / 2;
  const auto dense = [](Form form, int64_t dm, int64_t n, int64_t k, const Bf16* a, const Bf16* b,
                        Bf16* out) {
    return [=](DenseGemm& gemm, Timer& timer) { return gemm.best(timer, form, dm, n, k, a, b, out); };
  };
  Bf16 *x = l.x->get(), *y = l.y->get(), *gate_up = l.gate_up->get(), *gate_up_out = l.gate_up_out->get();
  Bf16 *act = l.act->get(), *w_gate_up = l.w_gate_up->get(), *w_down = l.w_down->get(), *dw = l.dw.get();
  void* workspace = l.workspace.bytes.get();
  float *prob = l.prob->get(), *dprob = l.dprob.get(), *partials = l.partials.get(),
        *dw_fp32 = l.dw_fp32.get();
  return {
      {"gate_up + SwiGLU",
       [=](const Tiling& t) {
         return plan_for(sm90::GateUpProblem{rows, kWidth, kFeatures, x, w_gate_up, prob, gate_up_out, act},
                         t);
       },
       gate_up_flop, dense(Form::kForward, m, 2 * kFeatures, kWidth, x, w_gate_up, gate_up_out),
       gate_up_flop},
      {"gate_up plain",
       [=](const Tiling& t) {
         return plan_for(
             sm90::ForwardProblem{rows, kWidth, 2 * kFeatures, x, w_gate_up, gate_up_out, workspace}, t);
       },
       gate_up_flop, nullptr, 0, true},
      {"down",
       [=](const Tiling& t) {
         return plan_for(sm90::ForwardProblem{rows, kFeatures, kWidth, act, w_down, y, workspace}, t);
       },
       down_flop, dense(Form::kForward, m, kWidth, kFeatures, act, w_down, y), down_flop, true},
      {"down dgrad + dSwiGLU",
       [=](const Tiling& t) {
         return plan_for(sm90::DownDgradProblem{rows, kFeatures, kWidth, x, w_down, gate_up, prob,
                                                gate_up_out, partials, dprob},
                         t);
       },
       down_flop, dense(Form::kDgrad, m, kFeatures, kWidth, x, w_down, act), down_flop},
      {"gate_up dgrad",
       [=](const Tiling& t) {
         return plan_for(sm90::DgradProblem{rows, kWidth, 2 * kFeatures, gate_up, w_gate_up, y, workspace},
                         t);
       },
       gate_up_flop, dense(Form::kDgrad, m, kWidth, 2 * kFeatures, gate_up, w_gate_up, y), gate_up_flop,
       true},
      {"gate_up wgrad",
       [=](const Tiling& t) {
         return plan_for(sm90::WgradProblem{rows, kWidth, 2 * kFeatures, gate_up, x, dw}, t);
       },
       gate_up_flop, dense(Form::kWgrad, 2 * kFeatures, kWidth, per_expert, gate_up, x, dw),
       gate_up_flop / kExperts},
      {"down wgrad",
       [=](const Tiling& t) {
         return plan_for(sm90::WgradProblem{rows, kFeatures, kWidth, x, act, dw}, t);
       },
       down_flop, dense(Form::kWgrad, kWidth, kFeatures, per_expert, x, act, dw), down_flop / kExperts},
      {"gate_up wgrad += FP32",
       [=](const Tiling& t) {
         return plan_for(sm90::WgradProblem{rows, kWidth, 2 * kFeatures, gate_up, x, dw_fp32,
                                            sm90::GradientType::kFp32, true},
                         t);
       },
       gate_up_flop, nullptr, 0},
  };
}

// TFLOP/s, time, clock, and the share of the tensor cores' peak at that clock.
inline void print_timing(double flop, const Timing& timing, bool fp8) {
  const double flop_per_cycle = (fp8 ? 8192.0 : 4096.0) * 132;
  std::printf(" | %6.1f %6.3f %4.0f %4.1f", flop / timing.ms * 1e-9, timing.ms, timing.megahertz,
              100 * flop / (timing.ms * 1e3 * timing.megahertz * flop_per_cycle));
}

inline void time_routing(const char* name, const std::vector<int>& counts, DenseGemm* dense) {
  Layer layer(counts);
  Timer timer;
  BENCH_CUDA(cudaDeviceSynchronize());
  std::printf("\n%s: %lld rows of %lld\n%-24s", name, static_cast<long long>(layer.rows.valid),
              static_cast<long long>(layer.rows.capacity), "TFLOP/s, ms, MHz, % peak");
  for (const char* tiling : kTilingNames) std::printf(" | %-23s", tiling);
  std::printf(" | %s\n", dense != nullptr ? "cuBLASLt dense" : "");
  std::vector<TimedProduct> products = timed_products(layer);
  for (TimedProduct& product : timed_code_products(layer)) products.push_back(std::move(product));
  for (const TimedProduct& product : products) {
    std::printf("%-24s", product.name);
    for (const Tiling& tiling : kTilings) {
      if (tiling.split && !product.splits) {
        std::printf(" | %23s", "");
        continue;
      }
      const GroupedGemmPlan plan = product.plan(tiling);
      print_timing(product.flop, timer.measure([&] { BENCH_CUDA(plan.launch(nullptr)); }), product.fp8);
    }
    if (dense != nullptr && product.dense != nullptr) {
      print_timing(product.dense_flop, product.dense(*dense, timer), false);
    }
    std::printf("\n");
  }
}

inline void time_all() {
  DenseGemm dense;
  time_routing("T=4096, k=2, E=8", random_counts(4096, 2, kExperts, 11), &dense);
  time_routing("T=8192, k=2, E=8", random_counts(8192, 2, kExperts, 12), &dense);
  std::vector<int> skewed(kExperts, 8192 / 2 / (kExperts - 1));
  skewed[3] = 4096;
  time_routing("T=4096, one expert with half of the rows", skewed, nullptr);
}

}  // namespace bench
