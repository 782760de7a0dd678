#include "biomoe/model/decoder.h"

#include <algorithm>
#include <numeric>

#include "biomoe/ops/device.h"
#include "biomoe/ops/dispatch.h"
#include "biomoe/ops/embedding.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/rms_norm.h"
#include "biomoe/ops/rope.h"
#include "biomoe/ops/router.h"

namespace biomoe {
namespace {

// A long prompt runs in pieces of this many tokens, which bounds the activations; enough rows for full-speed
// products.
constexpr int64_t kChunkTokens = 512;

int64_t chunk_tokens(const ModelLimits& limits) {
  return std::min(limits.max_seqlen, kChunkTokens);
}

int64_t kv_width(const ModelConfig& config) {
  return config.num_key_value_heads * config.key_width();
}

ComputeTypes types_of(const ModelConfig& config, const ModelLimits& limits) {
  return compute_types(limits.device, config, false);
}

std::vector<TensorView> lay_out_cache(TensorAllocator& allocator, const ModelConfig& config,
                                      const ModelLimits& limits) {
  const DType type = types_of(config, limits).activation;
  std::vector<TensorView> cache;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    cache.push_back(allocator.tensor(type, {limits.max_seqlen, 2 * kv_width(config)}));
  }
  return cache;
}

DecoderTables lay_out_tables(TensorAllocator& allocator, const ModelConfig& config,
                             const ModelLimits& limits) {
  DecoderTables tables;
  tables.cos_SK2 = allocator.tensor(DType::kF32, {limits.max_seqlen, config.key_width() / 2});
  tables.sin_SK2 = allocator.tensor(DType::kF32, {limits.max_seqlen, config.key_width() / 2});
  tables.positions_S = allocator.tensor(DType::kI32, {limits.max_seqlen});
  tables.discarded = allocate_routing_stats(allocator, 1, config.num_local_experts);
  tables.logits_1V = allocator.tensor(DType::kF32, {1, config.vocab_size});
  return tables;
}

DecoderHost lay_out_host(TensorAllocator& allocator, const ModelConfig& config, const ModelLimits& limits) {
  DecoderHost host;
  host.tokens_S = allocator.tensor(DType::kI32, {limits.max_seqlen});
  host.logits_1V = allocator.tensor(DType::kF32, {1, config.vocab_size});
  host.offsets_E1 = allocator.tensor(DType::kI64, {config.num_local_experts + 1});
  return host;
}

DecoderActivations lay_out_activations(TensorAllocator& allocator, const ModelConfig& config,
                                       const ComputeTypes& types, int64_t tokens) {
  const int64_t T = tokens, D = config.hidden_size, A = config.num_attention_heads * config.key_width();
  DecoderActivations act;
  act.tokens_T = allocator.tensor(DType::kI32, {T});
  act.x_TD = allocator.tensor(types.activation, {T, D});
  act.mid_TD = allocator.tensor(types.activation, {T, D});
  act.delta_TD = allocator.tensor(types.activation, {T, D});
  act.norm_TD = allocator.tensor(types.activation, {T, D});
  act.rstd_T = allocator.tensor(DType::kF32, {T});
  act.q_TA = allocator.tensor(types.activation, {T, A});
  act.attn_TA = allocator.tensor(types.activation, {T, A});
  act.moe_saved = allocate_moe_saved(allocator, moe_shape(config, types), T);
  act.moe = allocate_moe_workspace(allocator, moe_shape(config, types), T, false);
  return act;
}

// Multiply-adds of the largest operation for `tokens` tokens that see `keys` keys.
int64_t largest_work(const ModelConfig& config, int64_t tokens, int64_t keys) {
  const int64_t queries = config.num_attention_heads * config.key_width();
  const int64_t experts = config.num_experts_per_tok * 2 * config.intermediate_size * config.hidden_size;
  return tokens * std::max({queries * config.hidden_size, experts, queries * keys});
}

LayerRoutingStats only_layer(const RoutingStats& stats) {
  const int64_t experts = stats.counts_LE.shape[1];
  return {.counts_E = TensorView(stats.counts_LE.data, DType::kI64, {experts}),
          .prob_sums_E = TensorView(stats.prob_sums_LE.data, DType::kF64, {experts}),
          .z_sum_1 = stats.z_sums_L};
}

size_t scratch_bytes(const ModelConfig& config, const ModelLimits& limits, int64_t tokens) {
  const Device device = limits.device;
  const int64_t experts = config.num_local_experts;
  const AttentionShape attention = attention_shape(config, limits.max_seqlen);
  return align_up(std::max({
      device == Device::kCpu ? attention_scratch_bytes(device, attention, tokens, limits.num_threads) : 0,
      router_forward_scratch_bytes(device, tokens, experts),
      dispatch_plan_scratch_bytes(device, tokens * config.num_experts_per_tok, experts),
  }));
}

}  // namespace

DecoderMemory plan_decoder_memory(const ModelConfig& config, const ModelLimits& limits) {
  const int64_t tokens = chunk_tokens(limits);
  const bool host = limits.device != Device::kCpu;
  return {.cache = planned_bytes([&](TensorAllocator& to) { lay_out_cache(to, config, limits); }),
          .tables = planned_bytes([&](TensorAllocator& to) { lay_out_tables(to, config, limits); }),
          .activations = planned_bytes([&](TensorAllocator& to) {
            lay_out_activations(to, config, types_of(config, limits), tokens);
          }),
          .scratch = scratch_bytes(config, limits, tokens),
          .host = host ? planned_bytes([&](TensorAllocator& to) { lay_out_host(to, config, limits); }) : 0};
}

Decoder::Decoder(Model& model)
    : config_(model.config()),
      types_(model.types()),
      max_seqlen_(model.limits().max_seqlen),
      expert_ffn_mode_(model.limits().expert_ffn_mode),
      num_threads_(model.limits().num_threads),
      attention_(attention_shape(config_, max_seqlen_)),
      ctx_(model.context()) {
  const ModelLimits& limits = model.limits();
  MemorySource& source = device_memory(limits.device);
  const DecoderMemory memory = plan_decoder_memory(config_, limits);
  tables_arena_ = Arena(memory.tables, "the decoder's tables", source);
  cache_arena_ = Arena(memory.cache, "the cache of keys and values", source);
  activations_arena_ = Arena(memory.activations, "the decoder's activations", source);
  scratch_ = Arena(memory.scratch, "the decoder's scratch", source);
  ctx_.scratch = &scratch_;
  if (limits.device != Device::kCpu) {
    host_arena_ = Arena(memory.host, "what the decoder tells the host", staging_memory(limits.device));
    host_ = lay_out_host(host_arena_, config_, limits);
  }
  cache_SC_ = lay_out_cache(cache_arena_, config_, limits);
  fill_tables(limits, memory.tables);
  const ParameterList& parameters = model.parameters();
  const TensorView weights = model.weights_A();
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    weights_.push_back(block_weights(parameters, config_, weights, layer));
  }
  embedding_VD_ = parameters.view(weights, parameters.find("model.embed_tokens.weight"));
  final_norm_D_ = parameters.view(weights, parameters.find("model.norm.weight"));
  head_VD_ = config_.tie_word_embeddings ? embedding_VD_
                                         : parameters.view(weights, parameters.find("lm_head.weight"));
}

void Decoder::fill_tables(const ModelLimits& limits, size_t bytes) {
  tables_ = lay_out_tables(tables_arena_, config_, limits);
  const bool direct = limits.device == Device::kCpu;
  Arena host(direct ? 0 : bytes, "the decoder's tables on the host");
  const DecoderTables filled = direct ? tables_ : lay_out_tables(host, config_, limits);
  fill_rope_tables(config_.rope_theta, config_.key_width(), filled.cos_SK2, filled.sin_SK2,
                   limits.rope_frequency_dtype);
  std::iota(filled.positions_S.i32(), filled.positions_S.i32() + max_seqlen_, 0);
  if (!direct) {
    const auto put = [this](const TensorView& to, const TensorView& from) {
      copy_to_device(ctx_, to.data, from.data, to.bytes());
    };
    put(tables_.cos_SK2, filled.cos_SK2);
    put(tables_.sin_SK2, filled.sin_SK2);
    put(tables_.positions_S, filled.positions_S);
    device_wait_sync(ctx_);
  }
  reset_routing_stats(ctx_, tables_.discarded);
}

void Decoder::poison() {
  reset();
  MemorySource& memory = device_memory(ctx_.device);
  for (const TensorView& cache : cache_SC_) memory.fill(cache.data, 0xff, cache.bytes());
  memory.fill(tables_.logits_1V.data, 0xff, tables_.logits_1V.bytes());
  activations_arena_.release(0);
  activations_arena_.poison_free();
  scratch_.poison_free();
}

TensorView Decoder::extend(std::span<const int32_t> tokens) {
  const auto count = static_cast<int64_t>(tokens.size());
  BM_CHECK(count >= 1 && count <= max_seqlen_ - length_,
           "decoder: {} tokens after {}, expected 1 or more and {} in all at most", count, length_,
           max_seqlen_);
  for (size_t begin = 0; begin < tokens.size(); begin += kChunkTokens) {
    run_chunk(tokens.subspan(begin, std::min<size_t>(kChunkTokens, tokens.size() - begin)));
  }
  write_logits();
  if (ctx_.device == Device::kCpu) return tables_.logits_1V;
  copy_to_host(ctx_, host_.logits_1V.data, tables_.logits_1V.data, tables_.logits_1V.bytes());
  device_wait_sync(ctx_);
  return host_.logits_1V;
}

// Each place of the staged tokens is written once before extend() waits.
void Decoder::put_tokens(std::span<const int32_t> tokens) {
  const TensorView target = ctx_.device == Device::kCpu
                                ? act_.tokens_T
                                : host_.tokens_S.rows(length_, static_cast<int64_t>(tokens.size()));
  std::copy(tokens.begin(), tokens.end(), target.i32());
  if (ctx_.device != Device::kCpu) copy_to_device(ctx_, act_.tokens_T.data, target.data, target.bytes());
}

void Decoder::run_chunk(std::span<const int32_t> tokens) {
  const auto count = static_cast<int64_t>(tokens.size());
  // A token of a small model takes less time than threads take to meet. Results are the same for any number.
  constexpr int64_t kWorthThreads = int64_t{1} << 20;
  const bool threads = largest_work(config_, count, length_ + count) >= kWorthThreads;
  ctx_.num_threads = threads ? num_threads_ : 1;
  activations_arena_.release(0);
  act_ = lay_out_activations(activations_arena_, config_, types_, count);
  act_.moe.offsets_host_E1 = host_.offsets_E1;
  put_tokens(tokens);
  embedding_forward(ctx_, {.tokens_T = act_.tokens_T, .weight_VD = embedding_VD_, .y_TD = act_.x_TD});
  TensorView previous_mid;
  for (size_t layer = 0; layer < weights_.size(); ++layer) {
    attend(layer, previous_mid);
    rms_norm_forward(ctx_, {.x_TD = act_.delta_TD,
                            .residual_TD = act_.x_TD,
                            .weight_D = weights_[layer].norm2_D,
                            .sum_TD = act_.mid_TD,
                            .y_TD = act_.norm_TD,
                            .rstd_T = act_.rstd_T,
                            .eps = config_.rms_norm_eps});
    moe_forward(ctx_, expert_ffn_mode_, moe_shape(config_, types_), weights_[layer].moe, act_.norm_TD,
                act_.moe_saved, act_.moe, only_layer(tables_.discarded), act_.delta_TD);
    previous_mid = act_.mid_TD;
  }
  length_ += count;
}

// block_attention_forward, with keys and values written to their place in the cache.
void Decoder::attend(size_t layer, TensorView previous_mid_TD) {
  const BlockWeights& weights = weights_[layer];
  const int64_t tokens = act_.x_TD.shape[0], queries = act_.q_TA.shape[1], keys = kv_width(config_);
  rms_norm_forward(ctx_, {.x_TD = previous_mid_TD ? act_.delta_TD : act_.x_TD,
                          .residual_TD = previous_mid_TD,
                          .weight_D = weights.norm1_D,
                          .sum_TD = previous_mid_TD ? act_.x_TD : TensorView(),
                          .y_TD = act_.norm_TD,
                          .rstd_T = act_.rstd_T,
                          .eps = config_.rms_norm_eps});
  const TensorView added = cache_SC_[layer].rows(length_, tokens);
  const TensorView seen = cache_SC_[layer].rows(0, length_ + tokens);
  const TensorView q_weight = weights.qkv_CD.rows(0, queries);
  const TensorView kv_weight = weights.qkv_CD.rows(queries, 2 * keys);
  gemm(ctx_, {.a = act_.norm_TD, .b = q_weight, .c = act_.q_TA, .transpose_b = true});
  gemm(ctx_, {.a = act_.norm_TD, .b = kv_weight, .c = added, .transpose_b = true});
  RopeArgs rotation{.x_TC = act_.q_TA,
                    .positions_T = tables_.positions_S.rows(length_, tokens),
                    .cos_SK2 = tables_.cos_SK2,
                    .sin_SK2 = tables_.sin_SK2,
                    .num_heads = attention_.num_heads,
                    .head_dim = attention_.head_dim};
  rope(ctx_, rotation);
  rotation.x_TC = added;
  rotation.num_heads = attention_.num_key_value_heads;
  rope(ctx_, rotation);
  attention_decode(ctx_, {.shape = attention_,
                          .q_TC = act_.q_TA,
                          .k_PC = seen.columns(0, keys),
                          .v_PC = seen.columns(keys, keys),
                          .out_TC = act_.attn_TA});
  gemm(ctx_, {.a = act_.attn_TA, .b = weights.out_DA, .c = act_.delta_TD, .transpose_b = true});
}

// Of the last token of the chunk alone.
void Decoder::write_logits() {
  const int64_t last = act_.x_TD.shape[0] - 1;
  rms_norm_forward(ctx_, {.x_TD = act_.delta_TD.rows(last, 1),
                          .residual_TD = act_.mid_TD.rows(last, 1),
                          .weight_D = final_norm_D_,
                          .sum_TD = act_.x_TD.rows(last, 1),
                          .y_TD = act_.norm_TD.rows(last, 1),
                          .rstd_T = act_.rstd_T.rows(last, 1),
                          .eps = config_.rms_norm_eps});
  head_logits(ctx_, act_.norm_TD.rows(last, 1), head_VD_, tables_.logits_1V);
}

}  // namespace biomoe
