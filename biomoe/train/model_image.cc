#include "biomoe/train/model_image.h"

#include <algorithm>
#include <array>
#include <utility>

#include "biomoe/model/parameter_io.h"
#include "biomoe/ops/device.h"

namespace biomoe {

size_t ModelImage::planned_bytes(const ParameterList& parameters, Device device, bool with_optimizer) {
  if (device == Device::kCpu) return 0;
  const size_t arena = align_up(static_cast<size_t>(parameters.arena_elements()) * sizeof(float));
  return with_optimizer ? 3 * arena : arena;
}

ModelImage::ModelImage(Model& model, Optimizer* optimizer, const Mesh* mesh)
    : model_(model), optimizer_(optimizer), mesh_(mesh && !mesh->alone() ? mesh : nullptr) {
  const ParameterList& parameters = model.parameters();
  const bool direct = model.limits().device == Device::kCpu;
  if (direct) {
    weights_A_ = model.weights_A();
    if (optimizer) exp_avg_A_ = optimizer->exp_avg_A();
    if (optimizer) exp_avg_sq_A_ = optimizer->exp_avg_sq_A();
  } else {
    arena_ = Arena(planned_bytes(parameters, model.limits().device, optimizer != nullptr),
                   "the model on the host");
    const Shape shape{parameters.arena_elements()};
    weights_A_ = arena_.tensor(DType::kF32, shape);
    if (optimizer) exp_avg_A_ = arena_.tensor(DType::kF32, shape);
    if (optimizer) exp_avg_sq_A_ = arena_.tensor(DType::kF32, shape);
  }
  owned_groups_.push_back(owned_group("model", weights_A_, holds_parts()));
  groups_.push_back(holds_parts() ? owned_groups_.back() : held_group("model", weights_A_));
  if (!optimizer) return;
  const std::array<std::pair<const char*, TensorView>, 2> moments{
      {{"exp_avg", exp_avg_A_}, {"exp_avg_sq", exp_avg_sq_A_}}};
  for (const auto& [name, arena_A] : moments) {
    owned_groups_.push_back(owned_group(name, arena_A, direct));
    groups_.push_back(direct ? owned_groups_.back() : held_group(name, arena_A));
  }
  if (model.fp8_state().delayed()) add_fp8_state();
}

void ModelImage::add_fp8_state() {
  const Fp8State& state = model_.fp8_state();
  amax_HN_ = state.amax_HN();
  scales_N_ = state.scales_N();
  if (model_.limits().device != Device::kCpu) {
    fp8_arena_ = Arena(align_up(amax_HN_.bytes()) + align_up(scales_N_.bytes()), "scales on the host");
    amax_HN_ = fp8_arena_.tensor(DType::kF32, amax_HN_.shape);
    scales_N_ = fp8_arena_.tensor(DType::kF32, scales_N_.shape);
    std::fill_n(scales_N_.f32(), scales_N_.num_elements(), 1.0f);
  }
  groups_.push_back({kFp8Group, {{"amax_history", amax_HN_}, {"scales", scales_N_}}});
  owned_groups_.push_back(groups_.back());
  if (!mesh_ || mesh_->rank() == 0) return;
  // All ranks hold the same, and the first saves it.
  for (NamedTensor& tensor : owned_groups_.back().tensors) {
    tensor.part = TensorPart{tensor.view.shape, 0};
    tensor.view = TensorView(tensor.view.data, tensor.view.dtype, Shape{0});
  }
}

// Parameters as the model reads them, or moments in the same places; of the experts only those held here.
TensorGroup ModelImage::held_group(const char* name, const TensorView& arena_A) const {
  TensorGroup group{name, {}};
  const ParameterList& parameters = model_.parameters();
  for (const auto& spec : parameters.specs()) {
    NamedTensor tensor{spec.name, ParameterList::view(arena_A, spec)};
    if (spec.parts > 1) tensor.part = TensorPart{spec.whole_shape(), spec.first_element()};
    group.tensors.push_back(std::move(tensor));
  }
  return group;
}

// The stretches that this rank owns; `arena_A` holds all places of the flat arenas, or (of_state) only the
// owned ones, region after region.
TensorGroup ModelImage::owned_group(const char* name, const TensorView& arena_A, bool of_state) const {
  TensorGroup group{name, {}};
  const ParameterList& parameters = model_.parameters();
  for (const auto& spec : parameters.specs()) {
    const StateStretch own = parameters.state_owners(spec).own();
    const bool whole = own.count == spec.num_elements() && spec.parts == 1;
    const int64_t place = of_state ? own.place : spec.offset + own.begin;
    const TensorView stretch =
        own.count == 0 ? TensorView(arena_A.data, arena_A.dtype, Shape{0}) : arena_A.rows(place, own.count);
    NamedTensor tensor{spec.name, whole ? TensorView(stretch.data, stretch.dtype, spec.shape) : stretch};
    if (!whole) tensor.part = TensorPart{spec.whole_shape(), spec.first_element() + own.begin};
    group.tensors.push_back(std::move(tensor));
  }
  return group;
}

StateArena ModelImage::state_arena(const ParamSpec& spec, const TensorView& arena_A) const {
  StateArena state{arena_A, model_.parameters().state_owners(spec)};
  if (mesh_ && state.owners.stretches.size() > 1)
    state.copies = state.owners.experts ? &mesh_->dp() : &mesh_->world();
  return state;
}

// Weights are whole, or what this rank owns of them.
StateArena ModelImage::weights_arena(const ParamSpec& spec) const {
  return model_.parameters().shards() ? state_arena(spec, model_.weights_A())
                                      : whole_arena(spec, model_.weights_A());
}

void ModelImage::initialize(uint64_t seed) {
  std::vector<float> whole;
  for (const auto& spec : model_.parameters().specs()) {
    if (!holds_parts()) {
      model_.initial_values(spec, seed, weights() + spec.offset);
      continue;
    }
    whole.resize(static_cast<size_t>(spec.num_elements()));
    model_.initial_values(spec, seed, whole.data());
    keep_part(spec, whole.data());
  }
}

void ModelImage::fill(const std::function<void(float* flat)>& fill) {
  if (!holds_parts()) return fill(weights());
  const ParameterList& parameters = model_.parameters();
  std::vector<float> flat(static_cast<size_t>(parameters.arena_elements()));
  fill(flat.data());
  for (const auto& spec : parameters.specs()) keep_part(spec, flat.data() + spec.offset);
}

// On the CPU ranks that shard have no place for whole weights.
bool ModelImage::holds_parts() const {
  return model_.limits().device == Device::kCpu && model_.parameters().shards();
}

void ModelImage::keep_part(const ParamSpec& spec, const float* values) {
  const StateStretch own = model_.parameters().state_owners(spec).own();
  std::copy_n(values + own.begin, own.count, weights_A_.f32() + own.place);
}

void ModelImage::round_weights_to_codes_sync() {
  model_.round_weights_to_codes();
  if (model_.limits().device == Device::kCpu) return;
  ParameterIo io(model_.context(), model_.types());
  for (const auto& spec : model_.parameters().specs())
    io.read_state_sync(spec, weights_arena(spec), weights() + spec.offset);
  upload_sync();
}

void ModelImage::download_sync() {
  BM_CHECK(!model_.update_due(), "weights are read or written while an update of them is due");
  if (model_.limits().device == Device::kCpu) return;
  ParameterIo io(model_.context(), model_.types());
  const bool masters = optimizer_ && optimizer_->master_A();
  const bool remainders = optimizer_ && optimizer_->remainder_A();
  for (const auto& spec : model_.parameters().specs()) {
    float* values = weights() + spec.offset;
    if (remainders) {
      io.read_masters_sync(spec, weights_arena(spec), state_arena(spec, optimizer_->remainder_A()), values);
    } else if (masters) {
      io.read_state_sync(spec, state_arena(spec, optimizer_->master_A()), values);
    } else {
      io.read_state_sync(spec, weights_arena(spec), values);
    }
    if (!optimizer_) continue;
    io.read_state_sync(spec, state_arena(spec, optimizer_->exp_avg_A()), exp_avg_A_.f32() + spec.offset);
    io.read_state_sync(spec, state_arena(spec, optimizer_->exp_avg_sq_A()),
                       exp_avg_sq_A_.f32() + spec.offset);
  }
  if (!scales_N_) return;
  copy_to_host(model_.context(), amax_HN_.data, model_.fp8_state().amax_HN().data, amax_HN_.bytes());
  copy_to_host(model_.context(), scales_N_.data, model_.fp8_state().scales_N().data, scales_N_.bytes());
  device_wait_sync(model_.context());
}

void ModelImage::upload_sync() {
  BM_CHECK(!model_.update_due(), "weights are read or written while an update of them is due");
  if (model_.limits().device == Device::kCpu) return;
  ParameterIo io(model_.context(), model_.types());
  model_.weights_changed();
  for (const auto& spec : model_.parameters().specs()) {
    io.write_state_sync(spec, weights() + spec.offset, weights_arena(spec));
    if (!optimizer_) continue;
    for (const TensorView& masters : {optimizer_->master_A(), optimizer_->remainder_A()}) {
      if (masters) io.write_state_sync(spec, weights() + spec.offset, state_arena(spec, masters));
    }
    io.write_state_sync(spec, exp_avg_A_.f32() + spec.offset, state_arena(spec, optimizer_->exp_avg_A()));
    io.write_state_sync(spec, exp_avg_sq_A_.f32() + spec.offset,
                        state_arena(spec, optimizer_->exp_avg_sq_A()));
  }
  if (!scales_N_) return;
  copy_to_device(model_.context(), model_.fp8_state().amax_HN().data, amax_HN_.data, amax_HN_.bytes());
  copy_to_device(model_.context(), model_.fp8_state().scales_N().data, scales_N_.data, scales_N_.bytes());
  device_wait_sync(model_.context());
}

}  // namespace biomoe
