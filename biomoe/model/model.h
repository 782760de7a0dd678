// The Mixtral decoder: parameters, activations and the passes of one micro-batch.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/data/batch.h"
#include "biomoe/model/block.h"
#include "biomoe/model/fp8_state.h"
#include "biomoe/model/head.h"
#include "biomoe/model/model_config.h"
#include "biomoe/model/parameters.h"
#include "biomoe/moe/peer_exchange.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/mirrored_arena.h"

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
  Device device = Device::kCpu;
  int64_t micro_batches = 1;   // of a step, at most; on a GPU gradients of several are summed in fp32
  bool deterministic = false;  // see Context, as for the next
  bool portable_kernels = false;
  Fp8Config fp8{};
  MeshPlace place{};             // of this rank: which experts it holds
  Comm* expert_ranks = nullptr;  // Mesh::ep(), where that is more than one rank; needed to run, not to plan
  bool expert_messages = false;  // between GPUs rows go in messages, which cannot be recorded, and not
                                 // through memory that the ranks share; between CPUs they always do
};

// Bytes that a Model takes, by category. The same code lays the memory out.
struct ModelMemory {
  size_t weights = 0;
  size_t gradients = 0;
  size_t saved_activations = 0;
  size_t workspace = 0;
};
ModelMemory plan_model_memory(const ModelConfig& config, const ModelLimits& limits);

// The arrays of one batch where the device reads them.
struct DeviceBatch {
  TensorView tokens_T, targets_T, loss_weights_T, positions_T, cu_seqlens_B1;
  int64_t num_tokens() const { return tokens_T.shape[0]; }
};

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

// Sums over the tokens of the batches since start_step().
struct LossSums {
  double weighted_nll = 0;  // sum of loss weight * nll: divided by the global target weight it is the loss
  double nll = 0;           // sum of nll over targets with a weight other than 0
  int64_t targets = 0;      // how many those are
};

// What a step leaves besides gradients.
struct StepSums {
  LossSums loss;
  double balance_loss = 0;  // unscaled
  double z_loss = 0;
};

// What the passes of a step tell as they go through the stages of the model (see ParameterList::num_stages).
struct StageHooks {
  std::function<void(int64_t stage)> before_forward{};  // reads the stage's weights for the first time
  std::function<void(int64_t stage)> after_backward{};  // the stage's gradients are complete
};

// Where ranks shard parameters: what brings those of a stage to where the model has them, and takes their
// gradients from there. Called in every pass, of steps or not.
class StageShards {
 public:
  virtual ~StageShards() = default;
  // The stage's weights are read from here on.
  virtual void before_forward(int64_t stage) = 0;
  // They are, and its gradients are written: assigned, or added to where accumulate. Of the last stage, and
  // of the first where embeddings are tied, before the loss.
  virtual void before_backward(int64_t stage, bool accumulate) = 0;
  virtual void after_backward(int64_t stage) = 0;
  // Between steps, after before_forward: what the stage's weights have become there is what the ranks own.
  virtual void keep_weights(int64_t stage) = 0;
  // What ranks own was changed.
  virtual void weights_changed() = 0;
};

// Device work is given out in order and not waited for, but by the functions named sync. On the CPU
// everything is done on return.
class Model {
 public:
  // Reserves all memory; weights are zero until initialize() or a checkpoint fills them.
  Model(const ModelConfig& config, const ModelLimits& limits);

  const ModelConfig& config() const { return config_; }
  const ModelLimits& limits() const { return limits_; }
  const ComputeTypes& types() const { return types_; }
  const ParameterList& parameters() const { return parameters_; }
  Context& context() { return ctx_; }

  // Normal(0, initializer_range) for matrices, 1 for norms, from the seed and the parameter's name alone,
  // into values[0, spec.num_elements()) in fp32 and the hub's layout.
  void initial_values(const ParamSpec& spec, uint64_t seed, float* values) const;
  // Gives all weights these values; not where ranks shard them. Waits for the device.
  void initialize(uint64_t seed);

  // Needed to run, not to plan, where ranks shard parameters. It must outlive all passes.
  void set_shards(StageShards* shards) { shards_ = shards; }

  // Outside of a step: the weights that products quantise become what their codes for the forward pass stand
  // for.
  void round_weights_to_codes();

  TensorView weights_A() const { return weights_A_; }  // arenas on the device, see ParamSpec::held
  TensorView gradients_A() const { return gradients_A_; }
  TensorView weight(const ParamSpec& spec) const { return ParameterList::held_view(weights_A_, spec); }
  TensorView gradient(const ParamSpec& spec) const { return ParameterList::held_view(gradients_A_, spec); }
  // One a parameter, absent where there are none: partial sums of the squares of its gradient, made with it
  // (see GroupedGemmArgs::squares_P). Good until the gradients are changed. Empty with several micro-batches.
  std::span<const TensorView> gradient_squares() const { return gradient_squares_; }

  // Fills all activation memory with NaN patterns: what is read before it is written shows.
  void poison_activations();

  // A step: start_step, then for each micro-batch upload and forward, loss, backward; then finish_losses.
  // grad_scale multiplies every gradient. Only start_step, upload and finish_sync touch the host's memory:
  // what is between them can be recorded and replayed for batches of the same sizes.
  // `updated`: empty, or one a parameter: those of weight_codes() that this step's update of the weights
  // writes, absent for the others, which every step makes for itself. It must be the same for all replays.
  void start_step(double grad_scale, std::span<const WeightCodes> updated = {});

  // One a parameter: where products read its codes, absent where they read none.
  std::span<const WeightCodes> weight_codes() const { return weight_codes_; }
  // Weights were written other than by an update that writes their codes: start_step makes them anew.
  void weights_changed();
  // Whether an update of the weights is still to be made: then they are not to be read but by the step that
  // makes it.
  void set_update_due(bool due) { update_due_ = due; }
  bool update_due() const { return update_due_; }

  // Copies the batch to the device; `slot` of several micro-batches, each of which keeps its own memory.
  const DeviceBatch& upload(const Batch& batch, int64_t slot = 0);

  // Resets the sums and statistics of a step. Weights stay as they are from here to finish_step.
  void reset_sums();

  // Runs the layers for their routing statistics only. With gradient accumulation the load-balancing gradient
  // needs the counts of the whole global batch before the first backward.
  void count_routing(const DeviceBatch& batch, const StageHooks& hooks = {});

  // Embedding to final norm. accumulate_stats = false when count_routing has seen the batch already.
  void forward(const DeviceBatch& batch, bool accumulate_stats = true, const StageHooks& hooks = {});

  // After forward: fills nll and adds to the loss sums; with_gradient also starts backward. The parameters'
  // gradients are assigned, or added to where accumulate (as in backward).
  void loss(const DeviceBatch& batch, bool with_gradient, bool accumulate = false);

  // After loss(with_gradient). balance_coef and z_coef are the coefficients of the auxiliary losses, whose
  // sums are those of the tokens counted since reset_sums.
  void backward(const DeviceBatch& batch, double balance_coef, double z_coef, bool accumulate = false,
                const StageHooks& hooks = {});

  const Fp8State& fp8_state() const { return fp8_state_; }

  // Between ranks: the statistics since reset_sums, and the loss sums, become those of all, who routed
  // `tokens` tokens. The first must come before backward, whose auxiliary losses are of the whole global
  // batch.
  void share_routing(Comm& world, int64_t tokens);
  void share_losses(Comm& world);
  void share_amax(Comm& world);  // before finish_step

  // A replayed step routed so many tokens.
  void set_routed_tokens(int64_t tokens) { routing_.tokens = tokens; }

  // The auxiliary losses of the whole step, and everything the host wants to know on its way there.
  void finish_step(double balance_coef);
  // After waiting for the device: what the step left.
  StepSums sums() const;
  RoutingStats routing() const;                            // on the host
  TensorView loss_sums_3() const { return loss_sums_3_; }  // on the device

  // The batch's nll on the host, [T] f32; waits for the device.
  TensorView nll_sync();

  // After forward: logits of all tokens on the host, [T, V] f32, assigned; waits for the device.
  void logits_sync(TensorView logits_TV);

  // After a forward on the CPU: router softmax of a layer, [T, E] (training models only).
  TensorView router_probs(int64_t layer) const {
    return act_.blocks[static_cast<size_t>(layer)].moe.probs_TE;
  }

  // After forward: the first place on the way up where a value is not finite ("embedding", "layer 3
  // attention", "layer 3 experts", "final norm"; "layer 3" when that layer is recomputed), or "" when there
  // is none. Training models only. Waits for the device.
  std::string first_nonfinite_sync();
  // The first parameter, of what this rank holds, with a value that is not finite, or "". Waits for the
  // device.
  std::string first_nonfinite_weight_sync();

 private:
  void set_up_inputs();
  void set_up_batches();
  void copy_batch(const Batch& batch, int64_t slot);
  void compute_balance_loss(double balance_coef);
  void begin(const DeviceBatch& batch);
  void set_up_codes();
  void quantize_weights(int64_t stage);
  void run_layers(const DeviceBatch& batch, RoutingStats& stats, bool route_only, const StageHooks& hooks);
  LayerRoutingStats layer_stats(const RoutingStats& stats, int64_t layer) const;
  bool recomputed(int64_t layer) const { return layer < limits_.recompute_layers; }
  TensorView head_weight(const TensorView& arena) const;
  bool finite_sync(const TensorView& view);

  ModelConfig config_;
  ModelLimits limits_;
  ComputeTypes types_;
  ParameterList parameters_;
  DeviceHandle device_;
  Arena persistent_;  // weights, gradients, rotary tables
  Arena activations_;
  Arena scratch_;
  Arena host_tables_;                    // what the host knows of messages between GPUs
  std::unique_ptr<PeerExchange> peers_;  // where the experts of GPUs are split and share memory
  ExpertSplit split_;
  MirroredArena mirror_;  // sums and statistics
  Arena staging_;         // batches on their way to the device; unused on the CPU
  Arena batch_memory_;    // batches on the device; unused on the CPU
  Arena download_;        // nll and logits on their way back; unused on the CPU
  Context ctx_;
  Fp8State fp8_state_;
  TensorView weights_A_, gradients_A_;
  RoutingStats routing_, discarded_;
  TensorView balance_LE_, grad_scale_1_, loss_sums_3_, losses_2_, nonfinite_1_, offsets_host_E1_;
  std::vector<BlockWeights> block_weights_, block_gradients_;
  std::vector<TensorView> gradient_squares_;
  StageShards* shards_ = nullptr;  // where ranks shard parameters
  std::vector<DeviceBatch> batches_;
  std::array<std::vector<DeviceBatch>, 2> staged_;
  int turn_ = 0;
  bool in_step_ = false;            // between reset_sums and finish_step
  bool weights_quantized_ = false;  // in this step
  bool update_due_ = false;

  // Weights that products read codes of.
  static constexpr size_t kNoParameter = SIZE_MAX;
  struct CodedWeights {
    int64_t stage;
    size_t parameter;  // kNoParameter: they are several, and no update writes the codes
    TensorView weights_EOI;
    const OperandQuantizer* quantizer;
    bool updated = false;  // by this step's update, and with it the codes
    bool current = false;  // the codes are those of the weights, without being made again
  };
  std::vector<CodedWeights> coded_;
  std::vector<WeightCodes> weight_codes_;

  Activations act_;  // laid out anew for the tokens of each batch
  BlockInputs inputs_;
};

}  // namespace biomoe
