#include "biomoe/train/weight_update.h"

#include <algorithm>
#include <limits>

#include "biomoe/optim/replicas.h"

namespace biomoe {
namespace {

// What an H200's products, which are held by power, do not miss; and what AdamW moves on them (bench/NOTES.md,
// "AdamW beside the forward pass").
constexpr int kMultiprocessors = 8;
constexpr double kBytesPerSecond = 590e9;
// Of a layer's forward pass there, attention and what is between products included.
constexpr double kFlopsPerSecond = 560e12, kFlopsPerSecondFp8 = 850e12;

// The grouped kernels leave multiprocessors alone; the others are not told.
int multiprocessors_beside(const ModelLimits& limits) {
  constexpr int kHopper = 90;
  const bool grouped = limits.device == Device::kCuda && limits.expert_ffn_mode != ExpertFfnMode::kLoop;
  return grouped && device_info(limits.device).compute_capability == kHopper ? kMultiprocessors : 0;
}

// Seconds of a layer's forward pass over so many tokens.
double layer_seconds(const Model& model, int64_t tokens) {
  const ModelConfig& config = model.config();
  int64_t active = 0;
  for (const ParamSpec& spec : model.parameters().specs()) {
    if (spec.layer != 0 || spec.kind == ParamKind::kNorm) continue;
    const int64_t whole = spec.num_elements() * spec.parts;
    active += spec.kind == ParamKind::kExpert ? whole / config.num_local_experts * config.num_experts_per_tok
                                              : whole;
  }
  const auto codes = model.weight_codes();
  const bool fp8 = std::any_of(codes.begin(), codes.end(), [](const auto& code) { return bool(code); });
  return 2.0 * static_cast<double>(active) * static_cast<double>(tokens) /
         (fp8 ? kFlopsPerSecondFp8 : kFlopsPerSecond);
}

}  // namespace

WeightUpdate::WeightUpdate(Model& model, Optimizer& optimizer, const Mesh* mesh)
    : model_(model),
      optimizer_(optimizer),
      mesh_(mesh),
      codes_(model.weight_codes().begin(), model.weight_codes().end()),
      beside_(model.context(), multiprocessors_beside(model.limits())),
      multiprocessors_(device_info(model.limits().device).multiprocessors),
      beside_elements_(static_cast<size_t>(model.parameters().num_stages())) {
  for (size_t parameter = 0; parameter < codes_.size(); ++parameter) {
    if (!optimizer.writes_codes(parameter)) codes_[parameter] = {};
  }
}

Optimizer::UpdateArgs WeightUpdate::args() const {
  return {.weights_A = model_.weights_A(), .gradients_A = model_.gradients_A(), .codes = codes_};
}

// A stage's part has until its forward pass to be done. Where there is time for more than all of a stage, the
// stage before is given of it, within the time that is there until its own: late stages leave early ones
// what they do not need.
void WeightUpdate::plan(int64_t tokens) {
  if (beside_.multiprocessors() == 0 || tokens == planned_tokens_) return;
  planned_tokens_ = tokens;
  const double a_layer = layer_seconds(model_, tokens) * kBytesPerSecond /
                         static_cast<double>(optimizer_.update_bytes());  // elements in its time
  std::vector<int64_t> owned(beside_elements_.size());
  for (const ArenaRegion& region : model_.parameters().regions()) {
    if (region.copies == 1) owned[static_cast<size_t>(region.stage)] += region.count;
  }
  last_beside_ = -1;
  int64_t room = std::numeric_limits<int64_t>::max();
  for (auto stage = static_cast<int64_t>(owned.size()) - 1; stage >= 0; --stage) {
    const auto layers_before = static_cast<double>(std::max<int64_t>(0, stage - 1));
    room = std::min(room, static_cast<int64_t>(a_layer * layers_before));
    const int64_t elements = std::min(owned[static_cast<size_t>(stage)], room);
    beside_elements_[static_cast<size_t>(stage)] = elements;
    room -= elements;
    if (elements > 0) last_beside_ = std::max(last_beside_, stage);
  }
  optimizer_.set_beside(beside_elements_);
}

double WeightUpdate::beside_share() const {
  return static_cast<double>(optimizer_.beside_elements()) /
         static_cast<double>(model_.parameters().owned_elements());
}

void WeightUpdate::begin() {
  Context& ctx = model_.context();
  const int64_t stages = model_.parameters().num_stages();
  if (last_beside_ >= 0) beside_.fork();
  for (const UpdatePart part : {UpdatePart::kCopied, UpdatePart::kOwn}) {
    for (int64_t stage = 0; stage < stages; ++stage) optimizer_.update(ctx, args(), stage, part);
  }
  if (last_beside_ >= 0)
    ctx.multiprocessors = multiprocessors_ - beside_.multiprocessors();
}

void WeightUpdate::before_forward(int64_t stage) {
  Context& ctx = model_.context();
  if (beside_elements_[static_cast<size_t>(stage)] > 0) {
    optimizer_.update(beside_.context(), args(), stage, UpdatePart::kBeside);
    beside_.join();
  }
  if (stage == last_beside_) ctx.multiprocessors = 0;
  if (mesh_) gather_weights(ctx, model_.parameters(), *mesh_, model_.weights_A(), stage);
}

void WeightUpdate::leave() {
  left_ = true;
  model_.set_update_due(true);
}

void WeightUpdate::settle() {
  if (!left_) return;
  Context& ctx = model_.context();
  optimizer_.update(ctx, args());
  for (int64_t stage = 0; mesh_ && stage < model_.parameters().num_stages(); ++stage)
    gather_weights(ctx, model_.parameters(), *mesh_, model_.weights_A(), stage);
  left_ = false;
  model_.set_update_due(false);
}

}  // namespace biomoe
