#include "biomoe/optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "biomoe/ops/device.h"
#include "biomoe/ops/fill.h"

namespace biomoe {
namespace {

DType state_type(const OptimizerOptions& options) {
  return options.states == OptimizerStates::kBf16 ? DType::kBF16 : DType::kF32;
}

// Of what is kept beside weights that are not the master themselves.
size_t master_element_bytes(const OptimizerOptions& options) {
  if (options.device == Device::kCpu || options.states != OptimizerStates::kFp32) return 0;
  return options.store_param_remainders ? sizeof(uint16_t) : sizeof(float);
}

}  // namespace

OptimizerMemory Optimizer::plan_memory(const ParameterList& parameters, const OptimizerOptions& options) {
  const auto elements = static_cast<size_t>(parameters.owned_elements());
  OptimizerMemory memory;
  memory.moments = 2 * align_up(elements * dtype_size(state_type(options)));
  memory.masters = align_up(elements * master_element_bytes(options));
  memory.exchange =
      planned_bytes([&](TensorAllocator& to) { lay_out_exchange(to, parameters.specs().size()); });
  memory.due = align_up(kNumUpdateValues * sizeof(double));
  return memory;
}

Optimizer::Exchange Optimizer::lay_out_exchange(TensorAllocator& allocator, size_t segments) {
  return {.sums_S = allocator.tensor(DType::kF64, {static_cast<int64_t>(segments)}),
          .norm_1 = allocator.tensor(DType::kF64, {1}),
          .update_5 = allocator.tensor(DType::kF64, {kNumUpdateValues})};
}

Optimizer::Optimizer(const ParameterList& parameters, const AdamwConfig& config,
                     const OptimizerOptions& options)
    : parameters_(parameters), config_(config), device_(options.device), world_(options.world) {
  config_.validate();
  if (options.device == Device::kCpu && options.states != OptimizerStates::kFp32) {
    throw user_error("optimizer_states=bf16 needs device=cuda: on the CPU all states are fp32");
  }
  const OptimizerMemory memory = plan_memory(parameters, options);
  arena_ =
      Arena(memory.masters + memory.moments + memory.due, "optimiser state", device_memory(options.device));
  mirror_ = MirroredArena(options.device, memory.exchange, "the update's numbers");
  exp_avg_A_ = arena_.tensor(state_type(options), {parameters.owned_elements()});
  exp_avg_sq_A_ = arena_.tensor(state_type(options), {parameters.owned_elements()});
  if (memory.masters > 0) {
    TensorView& masters = options.store_param_remainders ? remainder_A_ : master_A_;
    masters = arena_.tensor(options.store_param_remainders ? DType::kU16 : DType::kF32,
                            {parameters.owned_elements()});
  }
  due_5_ = arena_.tensor(DType::kF64, {kNumUpdateValues});
  exchange_ = lay_out_exchange(mirror_, parameters.specs().size());
  for (const ArenaRegion& region : parameters.regions()) add_shard(region);
}

void Optimizer::add_shard(const ArenaRegion& region) {
  Shard shard{.begin = region.own, .count = region.owned_count()};
  const int64_t first = region.owned_begin();
  shard.first_sum = static_cast<int64_t>(summed_.size());
  if (!shards_.empty()) shard.state = shards_.back().state + shards_.back().count;
  for (const auto& spec : parameters_.specs()) {
    if (spec.offset < region.begin || spec.offset >= region.begin + region.count) continue;
    const int64_t begin = std::clamp<int64_t>(spec.offset - first, 0, shard.count);
    const int64_t end = std::clamp<int64_t>(spec.offset + spec.num_elements() - first, 0, shard.count);
    shard.segments.push_back({begin, end - begin, spec.kind != ParamKind::kNorm || config_.decay_norms});
    summed_.push_back(&spec);
  }
  // Sums of squares that products made hold only where no other rank adds to the gradients.
  if (region.copies == 1) shard.squares.resize(shard.segments.size());
  shard.codes.resize(shard.segments.size());
  shards_.push_back(std::move(shard));
}

size_t Optimizer::parameter_of(const Shard& shard, size_t segment) const {
  return parameters_.index_of(*summed_[static_cast<size_t>(shard.first_sum) + segment]);
}

bool Optimizer::writes_codes(size_t parameter) const {
  constexpr int64_t kVector = 8;  // see AdamwArgs::codes
  if (device_ == Device::kCpu) return false;
  for (const Shard& shard : shards_) {
    for (size_t i = 0; i < shard.segments.size(); ++i) {
      const ArenaSegment& segment = shard.segments[i];
      if (parameter_of(shard, i) == parameter && segment.begin % kVector == 0 &&
          segment.count == parameters_.specs()[parameter].num_elements()) {
        return true;
      }
    }
  }
  return false;
}

void Optimizer::start_step(Context& ctx, double lr) {
  const auto step = static_cast<double>(++steps_);
  double* update = mirror_.host(exchange_.update_5).f64();
  update[kLr] = lr;
  update[kCorrection1] = 1.0 - std::pow(config_.betas[0], step);
  update[kCorrection2] = 1.0 - std::pow(config_.betas[1], step);
  mirror_.push(ctx);
}

void Optimizer::clip(Context& ctx, TensorView gradients_A, double max_norm, TensorView loss_sums_3,
                     std::span<const TensorView> squares) {
  for (int64_t stage = 0; stage < parameters_.num_stages(); ++stage)
    add_squares(ctx, gradients_A, stage, squares);
  finish_clip(ctx, max_norm, loss_sums_3);
}

void Optimizer::add_squares(Context& ctx, TensorView gradients_A, int64_t stage,
                            std::span<const TensorView> squares) {
  Shard& of = shard(stage);
  for (size_t i = 0; i < of.squares.size(); ++i)
    of.squares[i] = squares.empty() ? TensorView() : squares[parameter_of(of, i)];
  sum_squares(ctx, {.x_A = gradients_A.rows(of.begin, of.count),
                    .segments = of.segments,
                    .sums_S = exchange_.sums_S.rows(of.first_sum, static_cast<int64_t>(of.segments.size())),
                    .partials = of.squares});
}

void Optimizer::add_squares(Context& ctx, TensorView gradients_A, int64_t stage, size_t segment) {
  const Shard& of = shard(stage);
  sum_squares(ctx, {.x_A = gradients_A.rows(of.begin, of.count),
                    .segments = std::span(of.segments).subspan(segment, 1),
                    .sums_S = exchange_.sums_S.rows(of.first_sum + static_cast<int64_t>(segment), 1)});
}

void Optimizer::finish_clip(Context& ctx, double max_norm, TensorView loss_sums_3) {
  if (world_) world_->all_reduce(ctx, exchange_.sums_S, ReduceOp::kSum, "the gradient norm");
  clip_factor(ctx, {.sums_S = exchange_.sums_S,
                    .loss_sums_3 = loss_sums_3,
                    .max_norm = max_norm,
                    .norm_1 = exchange_.norm_1,
                    .factor_1 = exchange_.update_5.rows(kGradScale, 1),
                    .apply_1 = exchange_.update_5.rows(kApply, 1)});
  copy_on_device(ctx, due_5_.data, exchange_.update_5.data, due_5_.bytes());
}

AdamwArgs Optimizer::update_args(const UpdateArgs& args, const Shard& shard) const {
  const auto state = [&](const TensorView& state_A) {
    return state_A ? state_A.rows(shard.state, shard.count) : TensorView();
  };
  return {.weights_A = args.weights_A.rows(shard.begin, shard.count),
          .master_A = state(master_A_),
          .remainder_A = state(remainder_A_),
          .grad_A = args.gradients_A.rows(shard.begin, shard.count),
          .exp_avg_A = state(exp_avg_A_),
          .exp_avg_sq_A = state(exp_avg_sq_A_),
          .segments = shard.segments,
          .codes = shard.codes,
          .beta1 = config_.betas[0],
          .beta2 = config_.betas[1],
          .eps = config_.eps,
          .weight_decay = config_.weight_decay,
          .update_5 = due_5_};
}

void Optimizer::update(Context& ctx, const UpdateArgs& args, int64_t stage) {
  Shard& of = shard(stage);
  for (size_t i = 0; i < of.codes.size(); ++i)
    of.codes[i] = args.codes.empty() ? WeightCodes() : args.codes[parameter_of(of, i)];
  adamw(ctx, update_args(args, of));
}

void Optimizer::update(Context& ctx, const UpdateArgs& args, int64_t stage, const ArenaSegment& part) {
  AdamwArgs update = update_args(args, shard(stage));
  update.segments = std::span(&part, 1);
  update.codes = {};
  adamw(ctx, update);
}

void Optimizer::update(Context& ctx, const UpdateArgs& args) {
  for (int64_t stage = 0; stage < parameters_.num_stages(); ++stage) update(ctx, args, stage);
  fill_zero(ctx, {.x = due_5_});
}

void Optimizer::finish_step(Context& ctx) {
  mirror_.pull(ctx);
}

double Optimizer::gradient_norm() const {
  return *mirror_.host(exchange_.norm_1).f64();
}

bool Optimizer::update_made() const {
  return mirror_.host(exchange_.update_5).f64()[kApply] != 0;
}

std::string Optimizer::first_nonfinite() const {
  const double* sums = mirror_.host(exchange_.sums_S).f64();
  for (size_t i = 0; i < summed_.size(); ++i) {
    if (!std::isfinite(sums[i])) return summed_[i]->name;
  }
  return "";
}

}  // namespace biomoe
