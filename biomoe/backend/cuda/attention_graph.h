// cuDNN's attention as graphs, without its headers.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "biomoe/ops/attention_calls.h"

namespace biomoe::cuda {

// Everything a graph is built from. Operands that a direction does not have keep a stride of 0.
struct AttentionGraphKey {
  bool backward = false;
  bool deterministic = false;
  int64_t sequences = 0;
  int64_t max_seqlen = 0;
  int64_t max_tokens = 0;  // backward only
  int64_t heads = 0;
  int64_t key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t window = 0;                                 // 0: none
  std::array<int64_t, kAttentionOperands> strides{};  // elements from one token to the next

  auto operator<=>(const AttentionGraphKey&) const = default;
};

struct AttentionBuffers {
  std::array<void*, kAttentionOperands> data{};
  std::array<int64_t*, kAttentionOperands> offsets{};
  int32_t* lengths = nullptr;
  void* workspace = nullptr;
};

class AttentionGraph;

// The library handle and the graphs built so far. A graph is built when first asked for, which takes long
// and must not happen while a step is recorded.
class AttentionPlans {
 public:
  // Throws user_error when cuDNN is too old.
  AttentionPlans();
  ~AttentionPlans();

  // Throws user_error with cuDNN's reason when it cannot do this attention.
  const AttentionGraph& find_or_build(const AttentionGraphKey& key);
  size_t workspace_bytes(const AttentionGraph& graph) const;
  void run(const AttentionGraph& graph, cudaStream_t stream, const AttentionBuffers& buffers) const;

 private:
  void* handle_ = nullptr;
  std::map<AttentionGraphKey, std::unique_ptr<AttentionGraph>> graphs_;
};

}  // namespace biomoe::cuda
