// How a Model lays its memory out: what counts it before a run and what gives it out in one are the same
// functions.
#pragma once

#include <vector>

#include "biomoe/model/model.h"

namespace biomoe {

// Rotary tables.
struct ModelTables {
  TensorView cos_SK2, sin_SK2;
};

// What the host and the device tell each other.
struct ModelExchange {
  RoutingStats routing, discarded;
  TensorView balance_LE, grad_scale_1, loss_sums_3, losses_2, nonfinite_1, offsets_host_E1;
};

// The split that the limits ask for, without the memory and tables that a model has for it.
ExpertSplit expert_split(const ModelLimits& limits);

// What quantised operands depend on.
Fp8StateShape fp8_shape(const ModelConfig& config, const ModelLimits& limits);

// Lays out one micro-batch of `tokens` tokens; the vectors of `act` keep their capacity.
void lay_out_activations(TensorAllocator& allocator, const ModelConfig& config, const ModelLimits& limits,
                         const ComputeTypes& types, int64_t tokens, const ExpertSplit& split,
                         Activations& act);
ModelTables lay_out_tables(TensorAllocator& allocator, const ModelConfig& config, const ModelLimits& limits);
// Sums of squares of the experts' gradients, one view a parameter; none at all where gradients are sums of
// several micro-batches', each expert's is made by itself, or their products are of MX codes.
std::vector<TensorView> lay_out_squares(TensorAllocator& allocator, const ModelConfig& config,
                                        const ParameterList& parameters, const ModelLimits& limits);
ModelExchange lay_out_exchange(TensorAllocator& allocator, const ModelConfig& config);
DeviceBatch lay_out_batch(TensorAllocator& allocator, int64_t tokens, int64_t cu_seqlens);
// Room for the ends of so many sequences, of no tokens too, padded to a power of two.
int64_t cu_seqlens_capacity(int64_t sequences);

// Bytes of each.
size_t scratch_bytes(const ModelConfig& config, const ModelLimits& limits);
size_t host_table_bytes(const ModelConfig& config, const ModelLimits& limits);
size_t table_bytes(const ModelConfig& config, const ModelLimits& limits);
size_t squares_bytes(const ModelConfig& config, const ModelLimits& limits);
size_t exchange_bytes(const ModelConfig& config);
size_t batch_bytes(const ModelLimits& limits);
// Losses or a chunk of logits on the host.
size_t planned_download(const ModelConfig& config, const ModelLimits& limits);

}  // namespace biomoe
