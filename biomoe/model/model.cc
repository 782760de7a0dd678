#include "biomoe/model/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "biomoe/core/rng.h"
#include "biomoe/model/model_layout.h"
#include "biomoe/model/parameter_io.h"
#include "biomoe/ops/comm_clock.h"
#include "biomoe/ops/cross_entropy.h"
#include "biomoe/ops/embedding.h"
#include "biomoe/ops/fill.h"
#include "biomoe/ops/rms_norm.h"
#include "biomoe/ops/rope.h"
#include "biomoe/ops/router.h"

namespace biomoe {
namespace {

template <typename T>
TensorView view_of(const std::vector<T>& values, DType dtype) {
  // Ops take mutable views; the batch is only read.
  return TensorView(const_cast<T*>(values.data()), dtype, Shape{static_cast<int64_t>(values.size())});
}

// A matrix as the weights of one expert.
TensorView as_experts(const TensorView& w) {
  return w.shape.rank() == 3 ? w : TensorView(w.data, w.dtype, Shape{1, w.shape[0], w.shape[1]});
}

}  // namespace

Model::Model(const ModelConfig& config, const ModelLimits& limits)
    : config_(config),
      limits_(limits),
      types_(compute_types(limits.device, config, limits.micro_batches > 1)),
      parameters_((config.validate(), config), limits.place),
      device_(limits.device) {
  BM_CHECK(limits.max_tokens >= 0 && limits.max_seqlen >= 1 && limits.num_threads >= 1 &&
               limits.micro_batches >= 1,
           "model limits are unset");
  MemorySource& source = device_memory(limits.device);
  const ModelMemory memory = plan_model_memory(config, limits);
  persistent_ =
      Arena(memory.weights + memory.gradients + squares_bytes(config, limits) + table_bytes(config, limits),
            "the model's parameters", source);
  activations_ = Arena(memory.saved_activations, "activations", source);
  scratch_ = Arena(scratch_bytes(config, limits), "scratch", source);
  mirror_ = MirroredArena(limits.device, exchange_bytes(config), "the step's sums");
  ctx_ = Context{.device = limits.device,
                 .num_threads = limits.num_threads,
                 .scratch = &scratch_,
                 .state = device_.get(),
                 .stream = device_.stream(),
                 .deterministic = limits.deterministic,
                 .portable_kernels = limits.portable_kernels};
  weights_A_ = persistent_.tensor(types_.activation, {parameters_.held_elements()});
  if (limits.training) gradients_A_ = persistent_.tensor(types_.gradient, {parameters_.held_elements()});
  gradient_squares_ = lay_out_squares(persistent_, config, parameters_, limits);
  split_ = expert_split(limits);
  if (split_.shared_memory && split_.comm) {
    peers_ = std::make_unique<PeerExchange>(ctx_, moe_shape(config, types_, split_));
    split_.peers = peers_.get();
  } else if (limits.device != Device::kCpu && split_.ranks > 1) {
    host_tables_ =
        Arena(host_table_bytes(config, limits), "tables of messages", staging_memory(limits.device));
    split_.host = &host_tables_;
  }
  fp8_state_ = Fp8State(ctx_, config, fp8_shape(config, limits));
  set_up_inputs();
  set_up_batches();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    block_weights_.push_back(block_weights(parameters_, config, weights_A_, layer));
    const BlockQuantizers quantizers = fp8_state_.block(layer);
    BlockWeights& weights = block_weights_.back();
    weights.qkv_quantizer = quantizers.qkv;
    weights.out_quantizer = quantizers.out;
    weights.moe.gate_up_quantizer = quantizers.gate_up;
    weights.moe.down_quantizer = quantizers.down;
    if (limits.training) block_gradients_.push_back(block_weights(parameters_, config, gradients_A_, layer));
    if (!gradient_squares_.empty()) {
      set_gradient_squares(parameters_, gradient_squares_, layer, block_gradients_.back());
    }
  }
  set_up_codes();
  act_.blocks.reserve(static_cast<size_t>(config.num_hidden_layers));
  reset_sums();
  in_step_ = false;
  reset_routing_stats(ctx_, discarded_);
}

void Model::set_up_inputs() {
  const ModelExchange exchange = lay_out_exchange(mirror_, config_);
  routing_ = exchange.routing;
  discarded_ = exchange.discarded;
  balance_LE_ = exchange.balance_LE;
  grad_scale_1_ = exchange.grad_scale_1;
  loss_sums_3_ = exchange.loss_sums_3;
  losses_2_ = exchange.losses_2;
  nonfinite_1_ = exchange.nonfinite_1;
  offsets_host_E1_ = limits_.device == Device::kCpu ? TensorView() : mirror_.host(exchange.offsets_host_E1);
  const ModelTables tables = lay_out_tables(persistent_, config_, limits_);
  Arena host(table_bytes(config_, limits_), "rotary tables");
  const ModelTables filled = limits_.device == Device::kCpu ? tables : lay_out_tables(host, config_, limits_);
  fill_rope_tables(config_.rope_theta, config_.key_width(), filled.cos_SK2, filled.sin_SK2,
                   limits_.rope_frequency_dtype);
  copy_to_device(ctx_, tables.cos_SK2.data, filled.cos_SK2.data, tables.cos_SK2.bytes());
  copy_to_device(ctx_, tables.sin_SK2.data, filled.sin_SK2.data, tables.sin_SK2.bytes());
  device_wait_sync(ctx_);
  inputs_.attention = attention_shape(config_, limits_.max_seqlen);
  inputs_.moe = moe_shape(config_, types_, split_);
  inputs_.expert_ffn_mode = limits_.expert_ffn_mode;
  inputs_.rms_norm_eps = config_.rms_norm_eps;
  inputs_.cos_SK2 = tables.cos_SK2;
  inputs_.sin_SK2 = tables.sin_SK2;
}

// A batch's place on the device is one block, filled by one copy from either of two places of staging memory
// in turn: the host may fill one while the copy from the other has yet to run.
void Model::set_up_batches() {
  batches_.resize(static_cast<size_t>(limits_.micro_batches));
  if (limits_.device == Device::kCpu) return;
  batch_memory_ = Arena(batch_bytes(limits_), "batches", device_memory(limits_.device));
  staging_ = Arena(2 * batch_bytes(limits_), "staging of batches", staging_memory(limits_.device));
  download_ = Arena(std::max(planned_download(config_, limits_), kArenaAlignment), "losses on the host",
                    staging_memory(limits_.device));
  const int64_t ends = cu_seqlens_capacity(limits_.max_tokens);
  for (DeviceBatch& batch : batches_) batch = lay_out_batch(batch_memory_, limits_.max_tokens, ends);
  for (auto& turn : staged_) {
    for (int64_t slot = 0; slot < limits_.micro_batches; ++slot) {
      turn.push_back(lay_out_batch(staging_, limits_.max_tokens, ends));
    }
  }
}

void Model::initial_values(const ParamSpec& spec, uint64_t seed, float* values) const {
  const int64_t count = spec.num_elements(), first = spec.first_element();
  if (spec.kind == ParamKind::kNorm) {
    std::fill(values, values + count, 1.0f);
    return;
  }
  const Rng rng(seed, RngStream::kInit, static_cast<uint32_t>(parameters_.index_of(spec)));
#pragma omp parallel for num_threads(limits_.num_threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(config_.initializer_range * rng.normal(static_cast<uint64_t>(first + i)));
  }
}

void Model::initialize(uint64_t seed) {
  BM_CHECK(!parameters_.shards(), "a rank that holds a part of the parameters gives them no values");
  ParameterIo io(ctx_, types_);
  std::vector<float> values;
  for (const auto& spec : parameters_.specs()) {
    values.resize(static_cast<size_t>(spec.num_elements()));
    initial_values(spec, seed, values.data());
    io.write_sync(spec, values.data(), weights_A_);
  }
  weights_changed();
}

void Model::round_weights_to_codes() {
  const auto round = [this](const OperandQuantizer& quantizer, const TensorView& w) {
    if (quantizer) quantizer.round_weights(ctx_, as_experts(w));
  };
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const BlockWeights& weights = block_weights_[static_cast<size_t>(layer)];
    const int64_t dense = ParameterList::dense_stage(layer), experts = ParameterList::experts_stage(layer);
    if (shards_) shards_->before_forward(dense);
    round(weights.qkv_quantizer, weights.qkv_CD);
    round(weights.out_quantizer, weights.out_DA);
    if (shards_) shards_->keep_weights(dense);
    if (shards_) shards_->before_forward(experts);
    round(weights.moe.gate_up_quantizer, weights.moe.gate_up_E2FD);
    round(weights.moe.down_quantizer, weights.moe.down_EDF);
    if (shards_) shards_->keep_weights(experts);
  }
  weights_changed();
}

void Model::poison_activations() {
  activations_.release(0);
  activations_.poison_free();
  scratch_.poison_free();
}

void Model::set_up_codes() {
  weight_codes_.resize(parameters_.specs().size());
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const BlockWeights& weights = block_weights_[static_cast<size_t>(layer)];
    const auto add = [&](int64_t stage, const char* name, const TensorView& w,
                         const OperandQuantizer& quantizer) {
      if (!quantizer.keeps_weights()) return;
      const TensorView w_EOI = as_experts(w);
      coded_.push_back({stage, kNoParameter, w_EOI, &quantizer});
      if (!name || quantizer.codes.in_turns) return;
      coded_.back().parameter =
          parameters_.index_of(parameters_.find(fmt::format("model.layers.{}.{}", layer, name)));
      weight_codes_[coded_.back().parameter] = quantizer.weight_codes();
    };
    const int64_t dense = ParameterList::dense_stage(layer), experts = ParameterList::experts_stage(layer);
    add(dense, nullptr, weights.qkv_CD, weights.qkv_quantizer);  // three parameters
    add(dense, "self_attn.o_proj.weight", weights.out_DA, weights.out_quantizer);
    add(experts, "mlp.experts.gate_up_proj", weights.moe.gate_up_E2FD, weights.moe.gate_up_quantizer);
    add(experts, "mlp.experts.down_proj", weights.moe.down_EDF, weights.moe.down_quantizer);
  }
}

void Model::weights_changed() {
  if (shards_) shards_->weights_changed();
  for (CodedWeights& coded : coded_) coded.current = false;
}

void Model::start_step(double grad_scale, std::span<const WeightCodes> updated) {
  *mirror_.host(grad_scale_1_).f64() = grad_scale;
  mirror_.push(ctx_);
  for (CodedWeights& coded : coded_) {
    coded.updated =
        coded.parameter != kNoParameter && !updated.empty() && static_cast<bool>(updated[coded.parameter]);
    if (coded.updated && !coded.current) coded.quantizer->quantize_weights(ctx_, coded.weights_EOI);
    coded.current = coded.updated;
  }
}

void Model::reset_sums() {
  reset_routing_stats(ctx_, routing_);
  fill_zero(ctx_, {.x = loss_sums_3_});
  fp8_state_.start_step(ctx_);
  in_step_ = true;
  weights_quantized_ = false;
}

const DeviceBatch& Model::upload(const Batch& batch, int64_t slot) {
  const int64_t tokens = batch.num_tokens();
  BM_CHECK(slot >= 0 && slot < limits_.micro_batches, "micro-batch {} of {}", slot, limits_.micro_batches);
  BM_CHECK(tokens <= limits_.max_tokens, "a batch of {} tokens, memory is planned for {}", tokens,
           limits_.max_tokens);
  for (size_t b = 0; b + 1 < batch.cu_seqlens.size(); ++b) {
    const int64_t length = batch.cu_seqlens[b + 1] - batch.cu_seqlens[b];
    BM_CHECK(length <= limits_.max_seqlen, "a sequence of {} tokens, memory is planned for {}", length,
             limits_.max_seqlen);
  }
  DeviceBatch& views = batches_[static_cast<size_t>(slot)];
  if (limits_.device == Device::kCpu) {
    views = {.tokens_T = view_of(batch.tokens, DType::kI32),
             .targets_T = view_of(batch.targets, DType::kI32),
             .loss_weights_T = view_of(batch.loss_weights, DType::kF32),
             .positions_T = view_of(batch.positions, DType::kI32),
             .cu_seqlens_B1 = view_of(batch.cu_seqlens, DType::kI32)};
    return views;
  }
  copy_batch(batch, slot);
  return views;
}

// Sequences are padded with empty ones to a power of two, so that batches of about as many run as the same
// recording.
void Model::copy_batch(const Batch& batch, int64_t slot) {
  DeviceBatch& views = batches_[static_cast<size_t>(slot)];
  const DeviceBatch& staged = staged_[static_cast<size_t>(turn_)][static_cast<size_t>(slot)];
  if (slot == 0) turn_ = 1 - turn_;
  const int64_t tokens = batch.num_tokens();
  const int64_t ends = cu_seqlens_capacity(std::max<int64_t>(1, batch.num_sequences()));
  const auto put = [&](TensorView& view, const TensorView& stage, const void* data, size_t bytes,
                       int64_t count) {
    std::memcpy(stage.data, data, bytes);
    view = TensorView(view.data, view.dtype, Shape{count});
    copy_to_device(ctx_, view.data, stage.data, view.bytes());
  };
  put(views.tokens_T, staged.tokens_T, batch.tokens.data(), batch.tokens.size() * sizeof(int32_t), tokens);
  put(views.targets_T, staged.targets_T, batch.targets.data(), batch.targets.size() * sizeof(int32_t),
      tokens);
  put(views.loss_weights_T, staged.loss_weights_T, batch.loss_weights.data(),
      batch.loss_weights.size() * sizeof(float), tokens);
  put(views.positions_T, staged.positions_T, batch.positions.data(), batch.positions.size() * sizeof(int32_t),
      tokens);
  std::fill_n(staged.cu_seqlens_B1.i32() + batch.cu_seqlens.size(),
              ends - static_cast<int64_t>(batch.cu_seqlens.size()), static_cast<int32_t>(tokens));
  put(views.cu_seqlens_B1, staged.cu_seqlens_B1, batch.cu_seqlens.data(),
      batch.cu_seqlens.size() * sizeof(int32_t), ends);
}

void Model::begin(const DeviceBatch& batch) {
  activations_.release(0);
  host_tables_.release(0);
  lay_out_activations(activations_, config_, limits_, types_, batch.num_tokens(), split_, act_);
  act_.workspace.moe.offsets_host_E1 = offsets_host_E1_;
  inputs_.positions_T = batch.positions_T;
  inputs_.cu_seqlens_B1 = batch.cu_seqlens_B1;
}

LayerRoutingStats Model::layer_stats(const RoutingStats& stats, int64_t layer) const {
  const int64_t experts = config_.num_local_experts;
  return {.counts_E = TensorView(stats.counts_LE.i64() + layer * experts, DType::kI64, {experts}),
          .prob_sums_E = TensorView(stats.prob_sums_LE.f64() + layer * experts, DType::kF64, {experts}),
          .z_sum_1 = TensorView(stats.z_sums_L.f64() + layer, DType::kF64, {1})};
}

TensorView Model::head_weight(const TensorView& arena_A) const {
  const char* name = config_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
  return ParameterList::held_view(arena_A, parameters_.find(name));
}

void Model::run_layers(const DeviceBatch& batch, RoutingStats& stats, bool route_only,
                       const StageHooks& hooks) {
  BM_CHECK(shards_ || !parameters_.shards(),
           "a pass over parameters that ranks shard, without what brings them");
  BM_CHECK(in_step_ || !update_due_, "a pass outside of a step, while an update of the weights is due");
  const auto before = [&](int64_t stage) {
    if (hooks.before_forward) hooks.before_forward(stage);
    if (shards_) shards_->before_forward(stage);
    quantize_weights(stage);
  };
  begin(batch);
  before(0);
  embedding_forward(ctx_, {.tokens_T = batch.tokens_T,
                           .weight_VD = weight(parameters_.specs().front()),
                           .y_TD = act_.blocks.front().x_TD});
  TensorView previous_mid;
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const auto index = static_cast<size_t>(layer);
    const bool last = layer + 1 == config_.num_hidden_layers;
    before(ParameterList::dense_stage(layer));
    block_attention_forward(ctx_, inputs_, block_weights_[index], previous_mid, act_.blocks[index],
                            act_.workspace);
    before(ParameterList::experts_stage(layer));
    block_experts_forward(ctx_, inputs_, block_weights_[index], act_.blocks[index], act_.workspace,
                          layer_stats(stats, layer), route_only && last);
    previous_mid = act_.blocks[index].mid_TD;
  }
  before(parameters_.num_stages() - 1);
  weights_quantized_ = in_step_;
  stats.tokens += batch.num_tokens();
}

// Once a step, since weights change between steps only, and what updates write is there already; outside of
// one, where they may have changed, every time; and where layers take turns, in every pass.
void Model::quantize_weights(int64_t stage) {
  for (const CodedWeights& coded : coded_) {
    if (coded.stage != stage) continue;
    const bool in_turns = coded.quantizer->codes.in_turns;
    const bool there = in_step_ && !in_turns && (coded.updated || weights_quantized_);
    if (!there) coded.quantizer->quantize_weights(ctx_, coded.weights_EOI);
  }
}

void Model::count_routing(const DeviceBatch& batch, const StageHooks& hooks) {
  run_layers(batch, routing_, true, hooks);
}

void Model::forward(const DeviceBatch& batch, bool accumulate_stats, const StageHooks& hooks) {
  run_layers(batch, accumulate_stats ? routing_ : discarded_, false, hooks);
  rms_norm_forward(ctx_, {.x_TD = act_.workspace.delta_TD,
                          .residual_TD = act_.blocks.back().mid_TD,
                          .weight_D = weight(parameters_.find("model.norm.weight")),
                          .sum_TD = act_.final_sum_TD,
                          .y_TD = act_.final_norm_TD,
                          .rstd_T = act_.final_rstd_T,
                          .eps = config_.rms_norm_eps});
}

void Model::loss(const DeviceBatch& batch, bool with_gradient, bool accumulate) {
  if (shards_ && with_gradient) {
    shards_->before_backward(parameters_.num_stages() - 1, accumulate);
    if (config_.tie_word_embeddings) shards_->before_backward(0, accumulate);
  }
  head_loss(ctx_,
            {.x_TD = act_.final_norm_TD,
             .weight_VD = head_weight(weights_A_),
             .targets_T = batch.targets_T,
             .weights_T = batch.loss_weights_T,
             .grad_scale_1 = grad_scale_1_,
             .dx_TD = with_gradient ? act_.workspace.dnorm_TD : TensorView(),
             .dweight_VD = with_gradient ? head_weight(gradients_A_) : TensorView(),
             .accumulate = accumulate},
            act_.head);
  loss_sums(ctx_, {.nll_T = act_.head.nll_T, .weights_T = batch.loss_weights_T, .sums_3 = loss_sums_3_});
}

void Model::backward(const DeviceBatch& batch, double balance_coef, double z_coef, bool accumulate,
                     const StageHooks& hooks) {
  const auto after = [this, &hooks](int64_t stage) {
    if (shards_) shards_->after_backward(stage);
    if (hooks.after_backward) hooks.after_backward(stage);
  };
  const auto& norm = parameters_.find("model.norm.weight");
  rms_norm_backward(ctx_, {.dy_TD = act_.workspace.dnorm_TD,
                           .sum_TD = act_.final_sum_TD,
                           .weight_D = weight(norm),
                           .rstd_T = act_.final_rstd_T,
                           .dresidual_TD = {},
                           .dx_TD = act_.dstream_TD,
                           .dweight_D = gradient(norm),
                           .accumulate = accumulate});
  after(parameters_.num_stages() - 1);
  compute_balance_loss(balance_coef);
  const double routings =
      static_cast<double>(config_.num_hidden_layers) * static_cast<double>(routing_.tokens);
  const double z_scale = routings > 0 ? z_coef / routings : 0.0;
  for (int64_t layer = config_.num_hidden_layers - 1; layer >= 0; --layer) {
    const auto index = static_cast<size_t>(layer);
    if (shards_) {
      for (const int64_t stage : {ParameterList::experts_stage(layer), ParameterList::dense_stage(layer)}) {
        shards_->before_backward(stage, accumulate);
        quantize_weights(stage);
      }
    }
    if (recomputed(layer)) {
      block_attention_forward(ctx_, inputs_, block_weights_[index], TensorView(), act_.blocks[index],
                              act_.workspace);
      block_experts_forward(ctx_, inputs_, block_weights_[index], act_.blocks[index], act_.workspace,
                            layer_stats(discarded_, layer));
    }
    const BlockAuxGradient aux{.balance_E = TensorView(balance_LE_.f32() + layer * config_.num_local_experts,
                                                       DType::kF32, {config_.num_local_experts}),
                               .z_scale = z_scale};
    block_experts_backward(ctx_, inputs_, block_weights_[index], block_gradients_[index], act_.blocks[index],
                           act_.workspace, aux, act_.dstream_TD, accumulate);
    after(ParameterList::experts_stage(layer));
    block_attention_backward(ctx_, inputs_, block_weights_[index], block_gradients_[index],
                             act_.blocks[index], act_.workspace, act_.dstream_TD, accumulate);
    after(ParameterList::dense_stage(layer));
  }
  if (shards_ && !config_.tie_word_embeddings) shards_->before_backward(0, accumulate);
  // A tied embedding's gradient has the head's part in it already.
  embedding_backward(ctx_, {.tokens_T = batch.tokens_T,
                            .dy_TD = act_.dstream_TD,
                            .dweight_VD = gradient(parameters_.specs().front()),
                            .accumulate = accumulate || config_.tie_word_embeddings});
  after(0);
}

void Model::share_routing(Comm& world, int64_t tokens) {
  const CommSpan span(ctx_);
  world.all_reduce(ctx_, routing_.counts_LE, ReduceOp::kSum, "the experts' loads");
  world.all_reduce(ctx_, routing_.prob_sums_LE, ReduceOp::kSum, "the routers' probabilities");
  world.all_reduce(ctx_, routing_.z_sums_L, ReduceOp::kSum, "the routers' z-loss");
  routing_.tokens = tokens;
}

void Model::share_losses(Comm& world) {
  world.all_reduce(ctx_, loss_sums_3_, ReduceOp::kSum, "the loss");
}

void Model::share_amax(Comm& world) {
  fp8_state_.share_amax(ctx_, world);
}

void Model::compute_balance_loss(double balance_coef) {
  balance_loss(ctx_, {.counts_LE = routing_.counts_LE,
                      .prob_sums_LE = routing_.prob_sums_LE,
                      .z_sums_L = routing_.z_sums_L,
                      .tokens = routing_.tokens,
                      .over = config_.router_aux_loss_type == AuxLossType::kHf ? BalanceOver::kAllLayers
                                                                               : BalanceOver::kEachLayer,
                      .balance_coef = balance_coef,
                      .losses_2 = losses_2_,
                      .balance_LE = balance_LE_});
}

void Model::finish_step(double balance_coef) {
  compute_balance_loss(balance_coef);
  fp8_state_.finish_step(ctx_);
  in_step_ = weights_quantized_ = false;
  mirror_.pull(ctx_);
}

StepSums Model::sums() const {
  const double* loss = mirror_.host(loss_sums_3_).f64();
  const double* losses = mirror_.host(losses_2_).f64();
  return {.loss = {.weighted_nll = loss[0], .nll = loss[1], .targets = static_cast<int64_t>(loss[2])},
          .balance_loss = losses[0],
          .z_loss = losses[1]};
}

RoutingStats Model::routing() const {
  return {.counts_LE = mirror_.host(routing_.counts_LE),
          .prob_sums_LE = mirror_.host(routing_.prob_sums_LE),
          .z_sums_L = mirror_.host(routing_.z_sums_L),
          .tokens = routing_.tokens};
}

TensorView Model::nll_sync() {
  const TensorView& nll_T = act_.head.nll_T;
  if (limits_.device == Device::kCpu) return nll_T;
  download_.release(0);
  const TensorView host = download_.tensor(DType::kF32, nll_T.shape);
  copy_to_host(ctx_, host.data, nll_T.data, nll_T.bytes());
  device_wait_sync(ctx_);
  return host;
}

void Model::logits_sync(TensorView logits_TV) {
  const TensorView weight_VD = head_weight(weights_A_);
  const int64_t tokens = act_.final_norm_TD.shape[0];
  const bool direct = limits_.device == Device::kCpu;
  const int64_t chunk = direct ? tokens : act_.head.logits_CV.shape[0];
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t rows = std::min(chunk, tokens - begin);
    const TensorView target = logits_TV.rows(begin, rows), x = act_.final_norm_TD.rows(begin, rows);
    if (direct) {
      head_logits(ctx_, x, weight_VD, target);
      continue;
    }
    const TensorView logits = act_.head.logits_CV.rows(0, rows);
    head_logits(ctx_, x, weight_VD, logits);
    download_.release(0);
    const TensorView host = download_.tensor(logits.dtype, logits.shape);
    copy_to_host(ctx_, host.data, logits.data, logits.bytes());
    device_wait_sync(ctx_);
    for (int64_t i = 0; i < host.num_elements(); ++i) target.f32()[i] = float_from_bf16(host.bf16()[i]);
  }
}

bool Model::finite_sync(const TensorView& view) {
  count_nonfinite(ctx_, {.x = view, .count_1 = nonfinite_1_});
  mirror_.pull(ctx_);
  device_wait_sync(ctx_);
  return *mirror_.host(nonfinite_1_).i64() == 0;
}

std::string Model::first_nonfinite_weight_sync() {
  const TensorView own = parameters_.shards() ? weights_A_.rows(0, parameters_.owned_elements()) : weights_A_;
  if (finite_sync(own)) return "";
  for (const ParamSpec& spec : parameters_.specs()) {
    TensorView held = weight(spec);
    if (parameters_.shards()) {
      const StateStretch part = parameters_.state_owners(spec).own();
      held = weights_A_.rows(part.place, part.count);
    }
    if (held.num_elements() > 0 && !finite_sync(held)) return spec.name;
  }
  return "";
}

std::string Model::first_nonfinite_sync() {
  if (!finite_sync(act_.blocks.front().x_TD)) return "embedding";
  // Of a recomputed layer only the input is kept.
  auto output_of = [this](int64_t layer) {
    return fmt::format("layer {}{}", layer, recomputed(layer) ? "" : " experts");
  };
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const BlockSaved& saved = act_.blocks[static_cast<size_t>(layer)];
    if (!finite_sync(saved.x_TD)) return output_of(layer - 1);
    if (recomputed(layer)) continue;
    if (!finite_sync(saved.mid_TD)) return fmt::format("layer {} attention", layer);
    if (!finite_sync(saved.moe.probs_TE)) return fmt::format("layer {} router", layer);
  }
  if (!finite_sync(act_.final_sum_TD)) return output_of(config_.num_hidden_layers - 1);
  if (!finite_sync(act_.final_norm_TD)) return "final norm";
  return "";
}

}  // namespace biomoe
