// Incremental decoding of one sequence: the keys and values of earlier tokens are kept, so that a further
// token costs one row of work and not the whole context again.
#pragma once

#include <span>
#include <vector>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/model/block.h"
#include "biomoe/model/model.h"

namespace biomoe {

// Bytes that a Decoder takes beside its model. The same code lays the memory out.
struct DecoderMemory {
  size_t cache = 0;  // keys and values of all layers
  size_t tables = 0;
  size_t activations = 0;
  size_t scratch = 0;
  size_t host = 0;  // pinned memory of the host; 0 on the CPU
};
DecoderMemory plan_decoder_memory(const ModelConfig& config, const ModelLimits& limits);

// What outlives a call.
struct DecoderTables {
  TensorView cos_SK2, sin_SK2;
  TensorView positions_S;  // i32: 0, 1, ..
  RoutingStats discarded;  // of one layer; the router counts, and nobody asks
  TensorView logits_1V;
};

// What the host and a GPU tell each other; absent on the CPU.
struct DecoderHost {
  TensorView tokens_S;  // i32
  TensorView logits_1V;
  TensorView offsets_E1;  // see MoeWorkspace
};

// Of one chunk of T tokens; shared by all layers.
struct DecoderActivations {
  TensorView tokens_T;  // i32
  TensorView x_TD;      // residual stream into the block
  TensorView mid_TD;    // after attention
  TensorView delta_TD;  // to be added to mid by the next norm
  TensorView norm_TD;
  TensorView rstd_T;
  TensorView q_TA;
  TensorView attn_TA;
  MoeSaved moe_saved;
  MoeWorkspace moe;
};

// Runs the layers of a Model on its device, on its own memory, sized for one sequence of limits().max_seqlen
// tokens; the model's activations are not touched. Reads the model's weights, which must outlive it, on every
// call.
class Decoder {
 public:
  explicit Decoder(Model& model);
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  int64_t capacity() const { return max_seqlen_; }
  int64_t length() const { return length_; }  // tokens in the cache
  void reset() { length_ = 0; }

  // Appends tokens, one or more, and returns the logits [1, V] (f32, on the host) that follow the last of
  // them: those of Model::forward over all tokens so far, within the rounding of its types. The view is good
  // until the next call. Waits for the device.
  // More tokens than capacity() are a fault of the program: Error(kFailure).
  TensorView extend(std::span<const int32_t> tokens);

  // Forgets the sequence and fills the cache, the activations and the logits with NaN patterns: what is read
  // before it is written shows.
  void poison();

 private:
  void fill_tables(const ModelLimits& limits, size_t bytes);
  void put_tokens(std::span<const int32_t> tokens);
  void run_chunk(std::span<const int32_t> tokens);
  void attend(size_t layer, TensorView previous_mid_TD);
  void write_logits();

  ModelConfig config_;
  ComputeTypes types_;
  int64_t max_seqlen_;
  ExpertFfnMode expert_ffn_mode_;
  int num_threads_;
  AttentionShape attention_;
  Arena tables_arena_, cache_arena_, activations_arena_, scratch_, host_arena_;
  Context ctx_;
  DecoderTables tables_;
  DecoderHost host_;
  std::vector<TensorView> cache_SC_;  // of each layer; a row holds G keys, rotated, then G values
  DecoderActivations act_;            // laid out anew for the tokens of each chunk
  TensorView embedding_VD_, final_norm_D_, head_VD_;
  std::vector<BlockWeights> weights_;
  int64_t length_ = 0;
};

}  // namespace biomoe
