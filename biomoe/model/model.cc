#include "biomoe/model/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "biomoe/core/rng.h"
#include "biomoe/ops/embedding.h"
#include "biomoe/ops/rms_norm.h"
#include "biomoe/ops/rope.h"

namespace biomoe {
namespace {

// Lays out one micro-batch of `tokens` tokens; the vectors of `act` keep their capacity.
void lay_out_activations(TensorAllocator& allocator, const ModelConfig& config, const ModelLimits& limits,
                         int64_t tokens, Activations& act) {
  const int64_t T = tokens, D = config.hidden_size;
  act.blocks.resize(static_cast<size_t>(config.num_hidden_layers));
  BlockSaved shared;
  bool have_shared = false;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    BlockSaved& saved = act.blocks[static_cast<size_t>(layer)];
    const bool own = limits.training && layer >= limits.recompute_layers;
    if (!own && !have_shared) {
      shared = allocate_block_saved(allocator, config, T);
      shared.x_TD = allocator.tensor(DType::kF32, {T, D});
      have_shared = true;
    }
    saved = own ? allocate_block_saved(allocator, config, T) : shared;
    if (limits.training) saved.x_TD = allocator.tensor(DType::kF32, {T, D});
  }
  act.workspace = allocate_block_workspace(allocator, config, T, limits.training);
  act.final_sum_TD = allocator.tensor(DType::kF32, {T, D});
  act.final_norm_TD = allocator.tensor(DType::kF32, {T, D});
  act.final_rstd_T = allocator.tensor(DType::kF32, {T});
  if (limits.training) act.dstream_TD = allocator.tensor(DType::kF32, {T, D});
  act.head = allocate_head_workspace(allocator, config.vocab_size, T);
}

size_t scratch_bytes(const ModelConfig& config, const ModelLimits& limits) {
  const size_t attention = attention_scratch_bytes(attention_shape(config, limits.max_seqlen),
                                                   limits.max_tokens, limits.num_threads);
  const size_t norm = rms_norm_backward_scratch_bytes(limits.max_tokens, config.hidden_size);
  return align_up(std::max(attention, norm)) + kArenaAlignment;
}

size_t arena_bytes(const ModelConfig& config) {
  return align_up(static_cast<size_t>(ParameterList(config).arena_elements()) * sizeof(float));
}

struct Tables {
  RoutingStats routing, discarded;
  TensorView balance_E, cos_SK2, sin_SK2;
};

Tables lay_out_tables(TensorAllocator& allocator, const ModelConfig& config, const ModelLimits& limits) {
  Tables tables;
  tables.routing = allocate_routing_stats(allocator, config.num_hidden_layers, config.num_local_experts);
  tables.discarded = allocate_routing_stats(allocator, config.num_hidden_layers, config.num_local_experts);
  tables.balance_E = allocator.tensor(DType::kF32, {config.num_local_experts});
  tables.cos_SK2 = allocator.tensor(DType::kF32, {limits.max_seqlen, config.key_width() / 2});
  tables.sin_SK2 = allocator.tensor(DType::kF32, {limits.max_seqlen, config.key_width() / 2});
  return tables;
}

size_t table_bytes(const ModelConfig& config, const ModelLimits& limits) {
  ArenaPlanner planner;
  lay_out_tables(planner, config, limits);
  return planner.used();
}

size_t activation_bytes(const ModelConfig& config, const ModelLimits& limits) {
  ArenaPlanner planner;
  Activations act;
  lay_out_activations(planner, config, limits, limits.max_tokens, act);
  return planner.used();
}

template <typename T>
TensorView view_of(const std::vector<T>& values, DType dtype) {
  // Ops take mutable views; the batch is only read.
  return TensorView(const_cast<T*>(values.data()), dtype, Shape{static_cast<int64_t>(values.size())});
}

bool finite(const TensorView& view) {
  const float* values = view.f32();
  const int64_t count = view.num_elements();
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

}  // namespace

ModelMemory plan_model_memory(const ModelConfig& config, const ModelLimits& limits) {
  ModelMemory memory;
  memory.weights = arena_bytes(config);
  memory.gradients = limits.training ? arena_bytes(config) : 0;
  memory.saved_activations = activation_bytes(config, limits);
  memory.workspace = scratch_bytes(config, limits) + table_bytes(config, limits);
  return memory;
}

Model::Model(const ModelConfig& config, const ModelLimits& limits)
    : config_(config), limits_(limits), parameters_((config.validate(), config)) {
  BM_CHECK(limits.max_tokens >= 0 && limits.max_seqlen >= 1 && limits.num_threads >= 1,
           "model limits are unset");
  const ModelMemory memory = plan_model_memory(config, limits);
  persistent_ =
      Arena(memory.weights + memory.gradients + table_bytes(config, limits), "the model's parameters");
  activations_ = Arena(memory.saved_activations, "activations");
  scratch_ = Arena(scratch_bytes(config, limits), "scratch");
  ctx_ = Context{
      .device = Device::kCpu, .num_threads = limits.num_threads, .scratch = &scratch_, .stream = nullptr};
  weights_A_ = persistent_.tensor(DType::kF32, {parameters_.arena_elements()});
  if (limits.training) gradients_A_ = persistent_.tensor(DType::kF32, {parameters_.arena_elements()});
  const Tables tables = lay_out_tables(persistent_, config, limits);
  routing_ = tables.routing;
  discarded_ = tables.discarded;
  balance_E_ = tables.balance_E;
  fill_rope_tables(config.rope_theta, config.key_width(), tables.cos_SK2, tables.sin_SK2,
                   limits.rope_frequency_dtype);
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    block_weights_.push_back(block_weights(parameters_, config, weights_A_.f32(), layer));
    if (limits.training) {
      block_gradients_.push_back(block_weights(parameters_, config, gradients_A_.f32(), layer));
    }
  }
  act_.blocks.reserve(static_cast<size_t>(config.num_hidden_layers));
  inputs_.attention = attention_shape(config, limits.max_seqlen);
  inputs_.moe = moe_shape(config);
  inputs_.expert_ffn_mode = limits.expert_ffn_mode;
  inputs_.rms_norm_eps = config.rms_norm_eps;
  inputs_.cos_SK2 = tables.cos_SK2;
  inputs_.sin_SK2 = tables.sin_SK2;
  routing_.reset();
  discarded_.reset();
}

void Model::initialize(uint64_t seed) {
  uint32_t index = 0;
  for (const auto& spec : parameters_.specs()) {
    float* values = weight(spec).f32();
    const int64_t count = spec.num_elements();
    const Rng rng(seed, RngStream::kInit, index++);
    if (spec.kind == ParamKind::kNorm) {
      std::fill(values, values + count, 1.0f);
      continue;
    }
#pragma omp parallel for num_threads(ctx_.num_threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(config_.initializer_range * rng.normal(static_cast<uint64_t>(i)));
    }
  }
}

void Model::zero_gradients() {
  std::memset(gradients_A_.data, 0, gradients_A_.bytes());
}

void Model::poison_activations() {
  activations_.release(0);
  activations_.poison_free();
  scratch_.poison_free();
}

void Model::begin(const Batch& batch) {
  const int64_t tokens = batch.num_tokens();
  BM_CHECK(tokens <= limits_.max_tokens, "a batch of {} tokens, memory is planned for {}", tokens,
           limits_.max_tokens);
  for (size_t b = 0; b + 1 < batch.cu_seqlens.size(); ++b) {
    const int64_t length = batch.cu_seqlens[b + 1] - batch.cu_seqlens[b];
    BM_CHECK(length <= limits_.max_seqlen, "a sequence of {} tokens, memory is planned for {}", length,
             limits_.max_seqlen);
  }
  activations_.release(0);
  lay_out_activations(activations_, config_, limits_, tokens, act_);
  inputs_.positions_T = view_of(batch.positions, DType::kI32);
  inputs_.cu_seqlens_B1 = view_of(batch.cu_seqlens, DType::kI32);
}

LayerRoutingStats Model::layer_stats(const RoutingStats& stats, int64_t layer) const {
  const int64_t experts = config_.num_local_experts;
  return {.counts_E = TensorView(stats.counts_LE.i64() + layer * experts, DType::kI64, {experts}),
          .prob_sums_E = TensorView(stats.prob_sums_LE.f64() + layer * experts, DType::kF64, {experts}),
          .z_sum_1 = TensorView(stats.z_sums_L.f64() + layer, DType::kF64, {1})};
}

TensorView Model::head_weight(const TensorView& arena) const {
  const char* name = config_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
  return parameters_.view(arena.f32(), parameters_.find(name));
}

void Model::run_layers(const Batch& batch, RoutingStats& stats, bool route_only) {
  begin(batch);
  embedding_forward(ctx_, {.tokens_T = view_of(batch.tokens, DType::kI32),
                           .weight_VD = weight(parameters_.specs().front()),
                           .y_TD = act_.blocks.front().x_TD});
  TensorView previous_mid;
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const auto index = static_cast<size_t>(layer);
    const bool last = layer + 1 == config_.num_hidden_layers;
    block_forward(ctx_, inputs_, block_weights_[index], previous_mid, act_.blocks[index], act_.workspace,
                  layer_stats(stats, layer), route_only && last);
    previous_mid = act_.blocks[index].mid_TD;
  }
  stats.tokens += batch.num_tokens();
}

void Model::count_routing(const Batch& batch) {
  run_layers(batch, routing_, true);
}

void Model::forward(const Batch& batch, bool accumulate_stats) {
  run_layers(batch, accumulate_stats ? routing_ : discarded_, false);
  rms_norm_forward(ctx_, {.x_TD = act_.workspace.delta_TD,
                          .residual_TD = act_.blocks.back().mid_TD,
                          .weight_D = weight(parameters_.find("model.norm.weight")),
                          .sum_TD = act_.final_sum_TD,
                          .y_TD = act_.final_norm_TD,
                          .rstd_T = act_.final_rstd_T,
                          .eps = config_.rms_norm_eps});
}

LossSums Model::loss(const Batch& batch, bool with_gradient, double grad_scale) {
  head_loss(ctx_,
            {.x_TD = act_.final_norm_TD,
             .weight_VD = head_weight(weights_A_),
             .targets_T = view_of(batch.targets, DType::kI32),
             .weights_T = view_of(batch.loss_weights, DType::kF32),
             .grad_scale = grad_scale,
             .dx_TD = with_gradient ? act_.workspace.dnorm_TD : TensorView(),
             .dweight_VD = with_gradient ? head_weight(gradients_A_) : TensorView()},
            act_.head);
  LossSums sums;
  const float* nll = act_.head.nll_T.f32();
  for (size_t t = 0; t < batch.targets.size(); ++t) {
    if (batch.loss_weights[t] == 0.0f) continue;
    sums.weighted_nll += static_cast<double>(batch.loss_weights[t]) * static_cast<double>(nll[t]);
    sums.nll += static_cast<double>(nll[t]);
    ++sums.targets;
  }
  return sums;
}

void Model::backward(const Batch& batch, double balance_coef, double z_coef) {
  const auto& norm = parameters_.find("model.norm.weight");
  rms_norm_backward(ctx_, {.dy_TD = act_.workspace.dnorm_TD,
                           .sum_TD = act_.final_sum_TD,
                           .weight_D = weight(norm),
                           .rstd_T = act_.final_rstd_T,
                           .dresidual_TD = {},
                           .dx_TD = act_.dstream_TD,
                           .dweight_D = gradient(norm)});
  load_balancing_gradient(routing_, balance_coef, balance_E_);
  const double routings =
      static_cast<double>(config_.num_hidden_layers) * static_cast<double>(routing_.tokens);
  const BlockAuxGradient aux{.balance_E = balance_E_, .z_scale = routings > 0 ? z_coef / routings : 0.0};
  for (int64_t layer = config_.num_hidden_layers - 1; layer >= 0; --layer) {
    const auto index = static_cast<size_t>(layer);
    if (recomputed(layer)) {
      block_forward(ctx_, inputs_, block_weights_[index], TensorView(), act_.blocks[index], act_.workspace,
                    layer_stats(discarded_, layer));
    }
    block_backward(ctx_, inputs_, block_weights_[index], block_gradients_[index], act_.blocks[index],
                   act_.workspace, aux, act_.dstream_TD);
  }
  embedding_backward(ctx_, {.tokens_T = view_of(batch.tokens, DType::kI32),
                            .dy_TD = act_.dstream_TD,
                            .dweight_VD = gradient(parameters_.specs().front())});
}

void Model::logits(TensorView logits_TV) {
  head_logits(ctx_, act_.final_norm_TD, head_weight(weights_A_), logits_TV);
}

std::string Model::first_nonfinite() const {
  if (!finite(act_.blocks.front().x_TD)) return "embedding";
  // Of a recomputed layer only the input is kept.
  auto output_of = [this](int64_t layer) {
    return fmt::format("layer {}{}", layer, recomputed(layer) ? "" : " experts");
  };
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const BlockSaved& saved = act_.blocks[static_cast<size_t>(layer)];
    if (!finite(saved.x_TD)) return output_of(layer - 1);
    if (recomputed(layer)) continue;
    if (!finite(saved.mid_TD)) return fmt::format("layer {} attention", layer);
    if (!finite(saved.moe.probs_TE)) return fmt::format("layer {} router", layer);
  }
  if (!finite(act_.final_sum_TD)) return output_of(config_.num_hidden_layers - 1);
  if (!finite(act_.final_norm_TD)) return "final norm";
  return "";
}

}  // namespace biomoe
