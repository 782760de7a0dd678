#include "biomoe/train/model_image.h"

#include "biomoe/model/parameter_io.h"

namespace biomoe {

size_t ModelImage::planned_bytes(const ParameterList& parameters, Device device, bool with_optimizer) {
  if (device == Device::kCpu) return 0;
  const size_t arena = align_up(static_cast<size_t>(parameters.arena_elements()) * sizeof(float));
  return with_optimizer ? 3 * arena : arena;
}

ModelImage::ModelImage(Model& model, Optimizer* optimizer) : model_(model), optimizer_(optimizer) {
  const ParameterList& parameters = model.parameters();
  if (model.limits().device == Device::kCpu) {
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
  const auto add = [&](const char* name, const TensorView& arena_A) {
    TensorGroup group{name, {}};
    for (const auto& spec : parameters.specs())
      group.tensors.push_back({spec.name, parameters.view(arena_A, spec)});
    groups_.push_back(std::move(group));
  };
  add("model", weights_A_);
  if (optimizer) add("exp_avg", exp_avg_A_);
  if (optimizer) add("exp_avg_sq", exp_avg_sq_A_);
}

void ModelImage::initialize(uint64_t seed) {
  for (const auto& spec : model_.parameters().specs())
    model_.initial_values(spec, seed, weights() + spec.offset);
}

void ModelImage::download_sync() {
  if (model_.limits().device == Device::kCpu) return;
  ParameterIo io(model_.context(), model_.types());
  const bool masters = optimizer_ && optimizer_->master_A();
  const bool remainders = optimizer_ && optimizer_->remainder_A();
  for (const auto& spec : model_.parameters().specs()) {
    float* values = weights() + spec.offset;
    if (remainders) {
      io.read_masters_sync(spec, model_.weights_A(), optimizer_->remainder_A(), values);
    } else {
      io.read_sync(spec, masters ? optimizer_->master_A() : model_.weights_A(), values);
    }
    if (!optimizer_) continue;
    io.read_sync(spec, optimizer_->exp_avg_A(), exp_avg_A_.f32() + spec.offset);
    io.read_sync(spec, optimizer_->exp_avg_sq_A(), exp_avg_sq_A_.f32() + spec.offset);
  }
}

void ModelImage::upload_sync() {
  if (model_.limits().device == Device::kCpu) return;
  ParameterIo io(model_.context(), model_.types());
  for (const auto& spec : model_.parameters().specs()) {
    io.write_sync(spec, weights() + spec.offset, model_.weights_A());
    if (!optimizer_) continue;
    for (const TensorView& masters : {optimizer_->master_A(), optimizer_->remainder_A()}) {
      if (masters) io.write_sync(spec, weights() + spec.offset, masters);
    }
    io.write_sync(spec, exp_avg_A_.f32() + spec.offset, optimizer_->exp_avg_A());
    io.write_sync(spec, exp_avg_sq_A_.f32() + spec.offset, optimizer_->exp_avg_sq_A());
  }
}

}  // namespace biomoe
