// AdamW over the model's flat arenas, in the regions that this rank owns (see ArenaRegion), with global-norm
// clipping and the finite check before it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/model/parameters.h"
#include "biomoe/ops/adamw.h"
#include "biomoe/ops/mirrored_arena.h"
#include "biomoe/optim/optim_config.h"

namespace biomoe {

// Where the optimiser's state is and what it is kept in.
struct OptimizerOptions {
  Device device = Device::kCpu;
  OptimizerStates states = OptimizerStates::kFp32;
  bool store_param_remainders = false;  // masters as bf16 weights and the 16 bits missing from them
  Comm* world = nullptr;  // all ranks, where there are several: the gradient norm is of all of them
};

// What the optimiser keeps. The weights themselves are the master where they are fp32 (the CPU), or
// where `states` is bf16. Elsewhere masters are fp32, or with store_param_remainders what is missing from the
// weights: the same numbers, and the same weights, bit for bit.
struct OptimizerMemory {
  size_t masters = 0;
  size_t moments = 0;
  size_t exchange = 0;
  size_t due = 0;
  size_t total() const { return masters + moments + exchange + due; }
};

class Optimizer {
 public:
  // State is kept for what the rank owns: owned_elements() of it, region after region.
  // Reserves state on the device: moments of zero, and masters or remainders where weights are bf16 and
  // states fp32 (to be filled by the caller). Throws user_error for a value out of range.
  Optimizer(const ParameterList& parameters, const AdamwConfig& config, const OptimizerOptions& options = {});
  static OptimizerMemory plan_memory(const ParameterList& parameters, const OptimizerOptions& options);

  // A step: start_step, then clip once all gradients are there, and finish_step; only start_step touches the
  // host's memory. What the step did can be asked for once the device has been waited for. The update of the
  // weights is due from clip on: it may be made with the next step, whose gradients must not be written
  // before.
  void start_step(Context& ctx, double lr);
  // The gradients' global norm, and the factor that brings it to at most max_norm (0: no clipping). The
  // update is not made where the norm or one of loss_sums_3 is not finite.
  // squares: see SumSquaresArgs::partials, one a parameter.
  void clip(Context& ctx, TensorView gradients_A, double max_norm, TensorView loss_sums_3 = {},
            std::span<const TensorView> squares = {});
  // clip in parts: the sums of squares of each stage, or of one of its segments after the other, in any order
  // once the gradients are there, and then the rest.
  void add_squares(Context& ctx, TensorView gradients_A, int64_t stage,
                   std::span<const TensorView> squares = {});
  void add_squares(Context& ctx, TensorView gradients_A, int64_t stage, size_t segment);
  void finish_clip(Context& ctx, double max_norm, TensorView loss_sums_3);
  void finish_step(Context& ctx);

  // Where an update is and what it writes.
  struct UpdateArgs {
    TensorView weights_A, gradients_A;
    // Empty, or one a parameter, absent for all but some of those that writes_codes: where the codes of its
    // new weights are written (see AdamwArgs::codes).
    std::span<const WeightCodes> codes{};
  };
  // The update that is due, of what this rank owns of a stage; changes nothing where none is.
  void update(Context& ctx, const UpdateArgs& args, int64_t stage);
  // Of a part of one of segments(stage), without codes.
  void update(Context& ctx, const UpdateArgs& args, int64_t stage, const ArenaSegment& part);
  // What this rank owns of a stage, a segment a parameter (some empty), from the first element that it owns.
  std::span<const ArenaSegment> segments(int64_t stage) const { return shard(stage).segments; }
  // All of it; after that none is due.
  void update(Context& ctx, const UpdateArgs& args);
  // Whether update can write codes of the parameter of this number: on a GPU, where this rank owns all of it.
  bool writes_codes(size_t parameter) const;

  double gradient_norm() const;  // before clipping
  bool update_made() const;
  std::string first_nonfinite() const;  // the first parameter whose gradient is not finite, or ""

  TensorView master_A() const { return master_A_; }        // absent where the weights are the master
  TensorView remainder_A() const { return remainder_A_; }  // u16, see SplitMaster; where it is, no master_A
  TensorView exp_avg_A() const { return exp_avg_A_; }
  TensorView exp_avg_sq_A() const { return exp_avg_sq_A_; }
  int64_t steps() const { return steps_; }  // started with a finite outcome, or set
  void set_steps(int64_t steps) { steps_ = steps; }

 private:
  struct Exchange {
    TensorView sums_S, norm_1, update_5;
  };
  static Exchange lay_out_exchange(TensorAllocator& allocator, size_t segments);
  // What this rank owns of a region: segments are relative to `begin`, one a parameter of the region, empty
  // where another rank owns all of it.
  struct Shard {
    int64_t begin = 0, count = 0;  // of the model's arenas
    int64_t state = 0;             // first element in the arenas of state
    int64_t first_sum = 0;         // of sums_S
    std::vector<ArenaSegment> segments{};
    std::vector<TensorView> squares{};  // of each, where no other rank adds to its gradient
    std::vector<WeightCodes> codes{};   // of each
  };
  Shard& shard(int64_t stage) { return shards_[static_cast<size_t>(stage)]; }
  const Shard& shard(int64_t stage) const { return shards_[static_cast<size_t>(stage)]; }
  size_t parameter_of(const Shard& shard, size_t segment) const;
  void add_shard(const ArenaRegion& region);
  AdamwArgs update_args(const UpdateArgs& args, const Shard& shard) const;

  const ParameterList& parameters_;
  AdamwConfig config_;
  Device device_;
  std::vector<Shard> shards_;             // one a stage
  std::vector<const ParamSpec*> summed_;  // parameter of each of sums_S
  Comm* world_;
  Arena arena_;
  MirroredArena mirror_;
  TensorView master_A_, remainder_A_, exp_avg_A_, exp_avg_sq_A_;
  Exchange exchange_;
  TensorView due_5_;  // update_5 of the update that is due, on the device alone; applies nothing if none is
  int64_t steps_ = 0;
};

}  // namespace biomoe
