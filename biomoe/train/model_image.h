// A model and its optimiser's state as checkpoints hold them: in fp32 on the host, under the checkpoint's
// names.
#pragma once

#include <functional>
#include <vector>

#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/core/arena.h"
#include "biomoe/model/model.h"
#include "biomoe/model/parameter_io.h"
#include "biomoe/optim/optimizer.h"

namespace biomoe {

// On the CPU the image is the memory of the model and the optimiser itself. Elsewhere it is a copy on the
// host (4 bytes a parameter, 12 with an optimiser) that download_sync and upload_sync bring in step with the
// device: fp32 masters where there are some, in one piece or two, moments widened from what they are kept in,
// all without loss and in the layout of the hub.
class ModelImage {
 public:
  static constexpr const char* kFp8Group = "fp8";  // what DelayedScaling keeps; other runs have no such group

  // The model and the optimiser (null: weights only) must outlive the image, as must the mesh of a rank that
  // is not alone.
  ModelImage(Model& model, Optimizer* optimizer, const Mesh* mesh = nullptr);
  static size_t planned_bytes(const ParameterList& parameters, Device device, bool with_optimizer);

  // What this rank holds: of the weights all that it reads, of the moments what it owns, or on a device
  // (which may own other elements in its layout) those of all that it holds.
  const std::vector<TensorGroup>& groups() const { return groups_; }
  // What it saves: over the ranks, every element once. Between ranks on devices download_sync and upload_sync
  // are calls of all of them.
  const std::vector<TensorGroup>& owned_groups() const { return owned_groups_; }
  // Flat, see ParamSpec::offset; not on the CPU where ranks shard parameters.
  float* weights() const { return weights_A_.f32(); }

  // Both on the image alone: Model::initial_values, and what `fill` writes to a flat arena of all weights,
  // which stands for a moment where ranks shard parameters on the CPU.
  void initialize(uint64_t seed);
  void fill(const std::function<void(float* flat)>& fill);
  // After upload_sync, before the first step: the weights that products quantise become what their codes
  // stand for, in the model, in its masters and here.
  void round_weights_to_codes_sync();
  void download_sync();
  void upload_sync();

 private:
  bool holds_parts() const;
  void keep_part(const ParamSpec& spec, const float* values);
  void add_fp8_state();
  StateArena weights_arena(const ParamSpec& spec) const;
  TensorGroup held_group(const char* name, const TensorView& arena_A) const;
  StateArena state_arena(const ParamSpec& spec, const TensorView& arena_A) const;
  TensorGroup owned_group(const char* name, const TensorView& arena_A, bool of_state) const;

  Model& model_;
  Optimizer* optimizer_;
  const Mesh* mesh_;  // null for a rank that is alone
  Arena arena_;
  TensorView weights_A_, exp_avg_A_, exp_avg_sq_A_;
  Arena fp8_arena_;
  TensorView amax_HN_, scales_N_;  // of DelayedScaling
  std::vector<TensorGroup> groups_, owned_groups_;
};

}  // namespace biomoe
