#include "biomoe/model/model_layout.h"

#include <algorithm>
#include <bit>

#include "biomoe/ops/adamw.h"
#include "biomoe/ops/dispatch.h"
#include "biomoe/ops/embedding.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/quantize.h"
#include "biomoe/ops/rms_norm.h"
#include "biomoe/ops/router.h"

namespace biomoe {

ExpertSplit expert_split(const ModelLimits& limits) {
  const bool gpus = limits.place.size.ep > 1 && limits.device != Device::kCpu;
  return {.ranks = limits.place.size.ep,
          .max_tokens = limits.max_tokens,
          .comm = limits.expert_ranks,
          .shared_memory = gpus && !limits.expert_messages};
}

Fp8StateShape fp8_shape(const ModelConfig& config, const ModelLimits& limits) {
  return {.config = limits.fp8,
          .types = compute_types(limits.device, config, limits.micro_batches > 1),
          .tokens = limits.max_tokens,
          .training = limits.training,
          .device = limits.device,
          .mode = limits.expert_ffn_mode,
          .split = expert_split(limits),
          .place = limits.place};
}

void lay_out_activations(TensorAllocator& allocator, const ModelConfig& config, const ModelLimits& limits,
                         const ComputeTypes& types, int64_t tokens, const ExpertSplit& split,
                         Activations& act) {
  const int64_t T = tokens, D = config.hidden_size;
  act.blocks.resize(static_cast<size_t>(config.num_hidden_layers));
  const bool native = passes_codes(config, fp8_shape(config, limits));
  const auto passes = [&](int64_t layer) { return native && fp8_layer(config, layer); };
  bool all_pass = true, any_passes = false;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    all_pass = all_pass && passes(layer);
    any_passes = any_passes || passes(layer);
  }
  BlockSaved shared;
  bool have_shared = false;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    BlockSaved& saved = act.blocks[static_cast<size_t>(layer)];
    const bool own = limits.training && layer >= limits.recompute_layers;
    if (!own && !have_shared) {
      // Of layers that are computed again, or are not trained: what any of them needs.
      const ExpertsKeep keep{.values = !all_pass, .compact = any_passes && limits.training};
      shared = allocate_block_saved(allocator, config, types, T, split, keep);
      shared.x_TD = allocator.tensor(types.activation, {T, D});
      have_shared = true;
    }
    const ExpertsKeep keep{.values = !passes(layer), .compact = passes(layer)};
    saved = own ? allocate_block_saved(allocator, config, types, T, split, keep) : shared;
    if (limits.training) saved.x_TD = allocator.tensor(types.activation, {T, D});
  }
  act.workspace = allocate_block_workspace(allocator, config, types, T, limits.training, split, any_passes);
  act.final_sum_TD = allocator.tensor(types.activation, {T, D});
  act.final_norm_TD = allocator.tensor(types.activation, {T, D});
  act.final_rstd_T = allocator.tensor(DType::kF32, {T});
  if (limits.training) act.dstream_TD = allocator.tensor(types.activation, {T, D});
  act.head = allocate_head_workspace(allocator, limits.device, types.activation, config.vocab_size, T);
}

size_t scratch_bytes(const ModelConfig& config, const ModelLimits& limits) {
  const Device device = limits.device;
  const int64_t tokens = limits.max_tokens, slots = tokens * config.num_experts_per_tok;
  // The optimiser's reduction takes its scratch from here too.
  std::vector<ArenaSegment> segments;
  const ParameterList parameters(config, limits.place);
  for (const auto& spec : parameters.specs()) segments.push_back({spec.offset, spec.num_elements(), true});
  const size_t largest = std::max({
      attention_scratch_bytes(device, attention_shape(config, limits.max_seqlen), tokens, limits.num_threads,
                              limits.deterministic),
      rms_norm_backward_scratch_bytes(device, tokens, config.hidden_size),
      router_forward_scratch_bytes(device, tokens, config.num_local_experts),
      dispatch_plan_scratch_bytes(device, slots, config.num_local_experts),
      embedding_backward_scratch_bytes(device, tokens, config.vocab_size, config.hidden_size),
      sum_squares_scratch_bytes(device, segments),
      limits.fp8.enabled ? quantize_scratch_bytes(device, config.num_local_experts) : 0,
  });
  return align_up(largest) + kArenaAlignment;
}

ModelTables lay_out_tables(TensorAllocator& allocator, const ModelConfig& config, const ModelLimits& limits) {
  const Shape shape{limits.max_seqlen, config.key_width() / 2};
  return {.cos_SK2 = allocator.tensor(DType::kF32, shape), .sin_SK2 = allocator.tensor(DType::kF32, shape)};
}

std::vector<TensorView> lay_out_squares(TensorAllocator& allocator, const ModelConfig& config,
                                        const ParameterList& parameters, const ModelLimits& limits) {
  if (!limits.training || limits.micro_batches > 1 || limits.expert_ffn_mode == ExpertFfnMode::kLoop ||
      mx_experts(config, limits.fp8, limits.device)) {
    return {};
  }
  std::vector<TensorView> squares(parameters.specs().size());
  for (size_t i = 0; i < squares.size(); ++i) {
    const ParamSpec& spec = parameters.specs()[i];
    if (spec.kind != ParamKind::kExpert) continue;
    const int64_t count = wgrad_squares_count(limits.device, spec.shape[0], spec.shape[1], spec.shape[2]);
    if (count > 0) squares[i] = allocator.tensor(DType::kF32, {count});
  }
  return squares;
}

ModelExchange lay_out_exchange(TensorAllocator& allocator, const ModelConfig& config) {
  const int64_t experts = config.num_local_experts;
  ModelExchange exchange;
  exchange.routing = allocate_routing_stats(allocator, config.num_hidden_layers, experts);
  exchange.discarded = allocate_routing_stats(allocator, config.num_hidden_layers, experts);
  exchange.balance_LE = allocator.tensor(DType::kF32, {config.num_hidden_layers, experts});
  exchange.grad_scale_1 = allocator.tensor(DType::kF64, {1});
  exchange.loss_sums_3 = allocator.tensor(DType::kF64, {3});
  exchange.losses_2 = allocator.tensor(DType::kF64, {2});
  exchange.nonfinite_1 = allocator.tensor(DType::kI64, {1});
  exchange.offsets_host_E1 = allocator.tensor(DType::kI64, {experts + 1});
  return exchange;
}

DeviceBatch lay_out_batch(TensorAllocator& allocator, int64_t tokens, int64_t cu_seqlens) {
  return {.tokens_T = allocator.tensor(DType::kI32, {tokens}),
          .targets_T = allocator.tensor(DType::kI32, {tokens}),
          .loss_weights_T = allocator.tensor(DType::kF32, {tokens}),
          .positions_T = allocator.tensor(DType::kI32, {tokens}),
          .cu_seqlens_B1 = allocator.tensor(DType::kI32, {cu_seqlens})};
}

size_t host_table_bytes(const ModelConfig& config, const ModelLimits& limits) {
  const ComputeTypes types = compute_types(limits.device, config, limits.micro_batches > 1);
  ExpertSplit split = expert_split(limits);
  return planned_bytes([&](TensorAllocator& host) {
    split.host = &host;
    ArenaPlanner device;
    Activations act;
    lay_out_activations(device, config, limits, types, limits.max_tokens, split, act);
  });
}

size_t table_bytes(const ModelConfig& config, const ModelLimits& limits) {
  return planned_bytes([&](TensorAllocator& planner) { lay_out_tables(planner, config, limits); });
}

size_t squares_bytes(const ModelConfig& config, const ModelLimits& limits) {
  const ParameterList parameters(config, limits.place);
  return planned_bytes(
      [&](TensorAllocator& planner) { lay_out_squares(planner, config, parameters, limits); });
}

size_t exchange_bytes(const ModelConfig& config) {
  return planned_bytes([&](TensorAllocator& planner) { lay_out_exchange(planner, config); });
}

int64_t cu_seqlens_capacity(int64_t sequences) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(1, sequences)))) + 1;
}

size_t batch_bytes(const ModelLimits& limits) {
  if (limits.device == Device::kCpu) return 0;
  return planned_bytes([&](TensorAllocator& planner) {
    for (int64_t slot = 0; slot < limits.micro_batches; ++slot) {
      lay_out_batch(planner, limits.max_tokens, cu_seqlens_capacity(limits.max_tokens));
    }
  });
}

size_t planned_download(const ModelConfig& config, const ModelLimits& limits) {
  const auto logits =
      static_cast<size_t>(std::min(limits.max_tokens, head_chunk_rows(limits.device, config.vocab_size)) *
                          config.vocab_size) *
      sizeof(uint16_t);
  return align_up(std::max(logits, static_cast<size_t>(limits.max_tokens) * sizeof(float)));
}

namespace {

size_t arena_bytes(const ModelConfig& config, const ModelLimits& limits, DType type) {
  const ParameterList parameters(config, limits.place);
  return align_up(static_cast<size_t>(parameters.held_elements()) * dtype_size(type));
}

size_t activation_bytes(const ModelConfig& config, const ModelLimits& limits) {
  const ComputeTypes types = compute_types(limits.device, config, limits.micro_batches > 1);
  ExpertSplit split = expert_split(limits);
  ArenaPlanner host;
  if (limits.device != Device::kCpu) split.host = &host;
  return planned_bytes([&](TensorAllocator& planner) {
    Activations act;
    lay_out_activations(planner, config, limits, types, limits.max_tokens, split, act);
  });
}

size_t exchange_of_rows_bytes(const ModelConfig& config, const ModelLimits& limits) {
  const ExpertSplit split = expert_split(limits);
  const ComputeTypes types = compute_types(limits.device, config, limits.micro_batches > 1);
  return split.shared_memory ? PeerExchange::planned_bytes(moe_shape(config, types, split)) : 0;
}

}  // namespace

ModelMemory plan_model_memory(const ModelConfig& config, const ModelLimits& limits) {
  const ComputeTypes types = compute_types(limits.device, config, limits.micro_batches > 1);
  ModelMemory memory;
  memory.weights = arena_bytes(config, limits, types.activation);
  memory.gradients = limits.training ? arena_bytes(config, limits, types.gradient) : 0;
  memory.saved_activations = activation_bytes(config, limits);
  memory.workspace = scratch_bytes(config, limits) + table_bytes(config, limits) + exchange_bytes(config) +
                     squares_bytes(config, limits) + batch_bytes(limits) +
                     exchange_of_rows_bytes(config, limits) +
                     Fp8State::planned_bytes(config, fp8_shape(config, limits));
  return memory;
}

}  // namespace biomoe
