// Each operation of the model as a benchmark: its arguments at the model's sizes, and what it has to do.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/bench.h"
#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/model/block.h"
#include "biomoe/model/head.h"
#include "biomoe/ops/adamw.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/train/memory_plan.h"

namespace biomoe::apps {

struct OpCase {
  std::string_view op;  // of BIOMOE_FOR_EACH_OP
  std::string what;     // which of its uses; "" where there is one
  double flops = 0;     // additions, multiplications, divisions and elementary functions, each as one
  double bytes = 0;     // what it must read and write, each operand once
  std::function<void(Context&)> run;  // may be called any number of times
};

// Tensors of one block, the head and the optimiser, laid out by the code that lays out a model's.
struct OpTensors {
  BlockSaved saved;
  BlockWorkspace work;
  HeadWorkspace head;
  RoutingStats stats;  // of one layer
  TensorView dstream_TD, dgate_up_R2F;
  TensorView weights_A, gradients_A, exp_avg_A, exp_avg_sq_A, sums_S;
  TensorView update_5, grad_scale_1, loss_sums_3, losses_2, balance_LE, norm_1, count_1;
  TensorView cos_SK2, sin_SK2;
};

class OpBench {
 public:
  // What the constructor is going to reserve and, as the last row, the program with its threads. Throws
  // user_error for options.model out of range and for sizes beyond counting.
  static RunMemory plan_memory(const BenchOptions& options);

  explicit OpBench(const BenchOptions& options);
  OpBench(const OpBench&) = delete;
  OpBench& operator=(const OpBench&) = delete;

  // In the order of a step, so that running each in turn gives every one valid operands. Every operation of
  // BIOMOE_FOR_EACH_OP is there.
  const std::vector<OpCase>& cases() const { return cases_; }
  Context& context() { return ctx_; }

 private:
  template <typename Args>
  void add(std::string_view op, void (*function)(Context&, const Args&), std::string what, double flops,
           std::initializer_list<TensorView> operands, const Args& args) {
    double bytes = 0;
    for (const TensorView& operand : operands) bytes += operand ? static_cast<double>(operand.bytes()) : 0.0;
    cases_.push_back({op, std::move(what), flops, bytes, [=](Context& ctx) { function(ctx, args); }});
  }
  void add_gemm(std::string what, const GemmArgs& args);
  void add_experts_gemm(std::string_view op, void (*function)(Context&, const GroupedGemmArgs&),
                        std::string what, const GroupedGemmArgs& args);
  void add_attention_inputs();
  void add_attention();
  void add_router();
  void add_experts();
  void add_head();
  void add_experts_backward();
  void add_attention_backward();
  void add_optimizer();
  void check_complete() const;
  double attention_product_flops() const;

  ModelConfig config_;
  ParameterList parameters_;
  Batch batch_;
  int64_t tokens_, seq_;
  Arena arena_, scratch_;
  Context ctx_;
  OpTensors at_;
  BlockWeights weights_, gradients_;
  TensorView tokens_T_, targets_T_, loss_weights_T_, positions_T_, cu_seqlens_B1_;
  AttentionShape attention_;
  std::vector<ArenaSegment> segments_;
  std::vector<OpCase> cases_;
};

}  // namespace biomoe::apps
