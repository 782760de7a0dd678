// The Mixtral decoder: parameters, activations and the passes of one micro-batch.
#pragma once

#include <string>
#include <vector>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/data/batch.h"
#include "biomoe/model/block.h"
#include "biomoe/model/head.h"
#include "biomoe/model/model_config.h"
#include "biomoe/model/parameters.h"

namespace biomoe {

// The sizes that memory is planned for.
struct ModelLimits {
  int64_t max_tokens = 0;  // T of any batch
  int64_t max_seqlen = 0;  // of any sequence in it
  int num_threads = 1;
  bool training = true;          // false: no gradients, and one layer's activations at a time
  int64_t recompute_layers = 0;  // the first layers keep only their input and run forward again in backward
  ExpertFfnMode expert_ffn_mode = ExpertFfnMode::kGroupedLinear;
  DType rope_frequency_dtype = DType::kF32;  // see fill_rope_tables
};

// Bytes that a Model takes, by category. The same code lays the memory out.
struct ModelMemory {
  size_t weights = 0;
  size_t gradients = 0;
  size_t saved_activations = 0;
  size_t workspace = 0;
};
ModelMemory plan_model_memory(const ModelConfig& config, const ModelLimits& limits);

// Activations and workspace of one micro-batch.
struct Activations {
  std::vector<BlockSaved> blocks;  // recomputed blocks, and all blocks of an inference model, share one
  BlockWorkspace workspace;
  TensorView final_sum_TD;   // residual stream after the last block
  TensorView final_norm_TD;  // what the head reads
  TensorView final_rstd_T;
  TensorView dstream_TD;  // training only: gradient of the residual stream
  HeadWorkspace head;
};

// Sums over the tokens of a batch, in token order.
struct LossSums {
  double weighted_nll = 0;  // sum of loss weight * nll: divided by the global target weight it is the loss
  double nll = 0;           // sum of nll over targets with a weight above 0
  int64_t targets = 0;      // how many those are
};

class Model {
 public:
  // Reserves all memory; weights are zero until initialize() or a checkpoint fills them.
  Model(const ModelConfig& config, const ModelLimits& limits);

  const ModelConfig& config() const { return config_; }
  const ModelLimits& limits() const { return limits_; }
  const ParameterList& parameters() const { return parameters_; }
  Context& context() { return ctx_; }

  // Normal(0, initializer_range) for matrices, 1 for norms, from the seed and the parameter's name alone.
  void initialize(uint64_t seed);

  TensorView weights_A() const { return weights_A_; }  // flat arenas, see ParamSpec::offset
  TensorView gradients_A() const { return gradients_A_; }
  TensorView weight(const ParamSpec& spec) const { return parameters_.view(weights_A_.f32(), spec); }
  TensorView gradient(const ParamSpec& spec) const { return parameters_.view(gradients_A_.f32(), spec); }

  // Statistics of the routers, added up by every forward and count_routing since the last reset.
  RoutingStats& routing() { return routing_; }

  void zero_gradients();
  // Fills all activation memory with NaN patterns: what is read before it is written shows.
  void poison_activations();

  // Runs the layers for their routing statistics only. With gradient accumulation the load-balancing gradient
  // needs the counts of the whole global batch before the first backward.
  void count_routing(const Batch& batch);

  // Embedding to final norm. accumulate_stats = false when count_routing has seen the batch already.
  void forward(const Batch& batch, bool accumulate_stats = true);

  // After forward: nll_T() and its sums; with_gradient also starts backward. grad_scale multiplies every
  // gradient.
  LossSums loss(const Batch& batch, bool with_gradient, double grad_scale = 0.0);
  TensorView nll_T() const { return act_.head.nll_T; }

  // After loss(with_gradient): accumulates every parameter's gradient. balance_coef and z_coef are the
  // coefficients of the auxiliary losses, whose sums are in routing().
  void backward(const Batch& batch, double balance_coef, double z_coef);

  // After forward: logits of all tokens, [T, V] f32, assigned.
  void logits(TensorView logits_TV);

  // Router logits are gone after forward; their softmax stays: [T, E] of a layer (training models only).
  TensorView router_probs(int64_t layer) const {
    return act_.blocks[static_cast<size_t>(layer)].moe.probs_TE;
  }

  // After forward: the first place on the way up where a value is not finite ("embedding", "layer 3
  // attention", "layer 3 experts", "final norm"; "layer 3" when that layer is recomputed), or "" when there
  // is none. Training models only.
  std::string first_nonfinite() const;

 private:
  void begin(const Batch& batch);
  void run_layers(const Batch& batch, RoutingStats& stats, bool route_only);
  LayerRoutingStats layer_stats(const RoutingStats& stats, int64_t layer) const;
  bool recomputed(int64_t layer) const { return layer < limits_.recompute_layers; }
  TensorView head_weight(const TensorView& arena) const;

  ModelConfig config_;
  ModelLimits limits_;
  ParameterList parameters_;
  Arena persistent_;  // weights, gradients, routing statistics, rotary tables
  Arena activations_;
  Arena scratch_;
  Context ctx_;
  TensorView weights_A_, gradients_A_;
  RoutingStats routing_, discarded_;
  TensorView balance_E_;
  TensorView cos_SK2_, sin_SK2_;
  std::vector<BlockWeights> block_weights_, block_gradients_;

  Activations act_;  // laid out anew for the tokens of each batch
  BlockInputs inputs_;
};

}  // namespace biomoe
