#include "biomoe/backend/cuda/attention_graph.h"

#include <cudnn_frontend.h>

#include <cmath>
#include <string>
#include <unordered_map>
#include <vector>

#include "biomoe/core/error.h"

namespace biomoe::cuda {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// cuDNN knows tensors by number: an operand by its own, its list of offsets by that and kOffsets.
constexpr int64_t kFirstOperand = 1;
constexpr int64_t kOffsets = 100;
constexpr int64_t kLengthsQ = 200;
constexpr int64_t kLengthsKv = 201;

constexpr std::array<const char*, kAttentionOperands> kNames = {"q",    "k",  "v",  "out", "lse",
                                                                "dout", "dq", "dk", "dv"};

cudnnHandle_t cudnn(void* handle) {
  return static_cast<cudnnHandle_t>(handle);
}

void check(cudnnStatus_t status, const char* call) {
  if (status != CUDNN_STATUS_SUCCESS) throw failure("attention: {}: {}", call, cudnnGetErrorString(status));
}

// cuDNN's messages may be of several lines.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

// What both directions declare: packed operands, lengths and the mask.
class GraphMaker {
 public:
  explicit GraphMaker(const AttentionGraphKey& key) : graph(std::make_shared<fe::graph::Graph>()), key_(key) {
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    lengths_q_ = lengths("lengths_q", kLengthsQ);
    lengths_kv_ = lengths("lengths_kv", kLengthsKv);
  }

  Tensor input(AttentionOperand operand) {
    Tensor tensor = graph->tensor(fe::graph::Tensor_attributes().set_name(kNames[operand]));
    describe(operand, tensor);
    return tensor;
  }

  void output(AttentionOperand operand, const Tensor& tensor) {
    tensor->set_output(true);
    describe(operand, tensor);
  }

  template <typename Attributes>
  Attributes attributes(const char* name) const {
    Attributes made;
    made.set_name(name);
    made.set_attn_scale(static_cast<float>(1.0 / std::sqrt(static_cast<double>(key_.head_dim))));
    made.set_padding_mask(true).set_seq_len_q(lengths_q_).set_seq_len_kv(lengths_kv_);
    // Counted from the start of each sequence, query i sees key j when j <= i + right and i < j + left.
    made.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    if (key_.window > 0) made.set_diagonal_band_left_bound(static_cast<int>(key_.window));
    return made;
  }

  std::shared_ptr<fe::graph::Graph> graph;

 private:
  Tensor lengths(const char* name, int64_t uid) {
    return graph->tensor(fe::graph::Tensor_attributes()
                             .set_name(name)
                             .set_uid(uid)
                             .set_dim({key_.sequences, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(fe::DataType_t::INT32));
  }

  // Rows of one token hold the heads side by side. The stride between sequences is not used: their offsets
  // are given.
  void describe(AttentionOperand operand, const Tensor& tensor) {
    const int64_t stride = key_.strides[operand];
    const Tensor offsets = graph->tensor(fe::graph::Tensor_attributes()
                                             .set_name(std::string(kNames[operand]) + "_offsets")
                                             .set_uid(kFirstOperand + operand + kOffsets)
                                             .set_dim({key_.sequences + 1, 1, 1, 1})
                                             .set_stride({1, 1, 1, 1})
                                             .set_data_type(fe::DataType_t::INT64));
    const bool key_side = operand == kAttentionK || operand == kAttentionV || operand == kAttentionDk ||
                          operand == kAttentionDv;
    const bool lse = operand == kAttentionLse;
    const int64_t width = lse ? 1 : key_.head_dim;
    tensor->set_uid(kFirstOperand + operand)
        .set_dim({key_.sequences, key_side ? key_.key_value_heads : key_.heads, key_.max_seqlen, width})
        .set_stride({key_.max_seqlen * stride, width, stride, 1})
        .set_data_type(lse ? fe::DataType_t::FLOAT : fe::DataType_t::BFLOAT16)
        .set_ragged_offset(offsets);
  }

  const AttentionGraphKey& key_;
  Tensor lengths_q_, lengths_kv_;
};

std::shared_ptr<fe::graph::Graph> forward_graph(const AttentionGraphKey& key) {
  GraphMaker maker(key);
  auto attributes = maker.attributes<fe::graph::SDPA_attributes>("attention_forward");
  attributes.set_generate_stats(true);
  const Tensor q = maker.input(kAttentionQ), k = maker.input(kAttentionK), v = maker.input(kAttentionV);
  const auto [out, lse] = maker.graph->sdpa(q, k, v, attributes);
  maker.output(kAttentionOut, out);
  maker.output(kAttentionLse, lse);
  return maker.graph;
}

std::shared_ptr<fe::graph::Graph> backward_graph(const AttentionGraphKey& key) {
  GraphMaker maker(key);
  auto attributes = maker.attributes<fe::graph::SDPA_backward_attributes>("attention_backward");
  // With the total length given, the sums of dk and dv lie as close as the tokens do. So would those of dq in
  // the other algorithm, but with several sequences in a call cuDNN 9.19 then gives a wrong dq (seen on an
  // H200): there every sequence gets max_seqlen rows, and attention_calls bounds how many sequences a call
  // has.
  if (key.deterministic) {
    attributes.set_max_total_seq_len_q(key.max_tokens).set_max_total_seq_len_kv(key.max_tokens);
  }
  attributes.set_deterministic_algorithm(key.deterministic);
  const Tensor q = maker.input(kAttentionQ), k = maker.input(kAttentionK), v = maker.input(kAttentionV);
  const Tensor out = maker.input(kAttentionOut), dout = maker.input(kAttentionDout);
  const Tensor lse = maker.input(kAttentionLse);
  const auto [dq, dk, dv] = maker.graph->sdpa_backward(q, k, v, out, dout, lse, attributes);
  maker.output(kAttentionDq, dq);
  maker.output(kAttentionDk, dk);
  maker.output(kAttentionDv, dv);
  return maker.graph;
}

}  // namespace

class AttentionGraph {
 public:
  AttentionGraph(const AttentionGraphKey& key, cudnnHandle_t handle)
      : backward_(key.backward), graph_(key.backward ? backward_graph(key) : forward_graph(key)) {
    fe::error_t error = graph_->build(handle, {fe::HeurMode_t::A});
    if (error.is_bad()) {
      throw user_error(
          "attention: cuDNN {} cannot do {}{} of {} heads, {} key/value heads of width {}, window {}: {}",
          cudnnGetVersion(), key.deterministic ? "deterministic " : "", key.backward ? "backward" : "forward",
          key.heads, key.key_value_heads, key.head_dim, key.window, one_line(error.get_message()));
    }
  }

  size_t workspace_bytes() const {
    int64_t bytes = 0;
    require(graph_->get_workspace_size(bytes));
    return static_cast<size_t>(bytes);
  }

  void run(cudnnHandle_t handle, const AttentionBuffers& buffers) const {
    std::unordered_map<int64_t, void*> pack = {{kLengthsQ, buffers.lengths}, {kLengthsKv, buffers.lengths}};
    const int count = backward_ ? kAttentionOperands : kAttentionDout;
    for (int operand = 0; operand < count; ++operand) {
      const auto index = static_cast<size_t>(operand);
      pack[kFirstOperand + operand] = buffers.data[index];
      pack[kFirstOperand + operand + kOffsets] = buffers.offsets[index];
    }
    require(graph_->execute(handle, pack, buffers.workspace));
  }

 private:
  static void require(fe::error_t error) {
    if (error.is_bad()) throw failure("attention: cuDNN: {}", one_line(error.get_message()));
  }

  bool backward_;
  std::shared_ptr<fe::graph::Graph> graph_;
};

AttentionPlans::AttentionPlans() {
  constexpr size_t kOldest = 91002;  // sliding windows over packed sequences
  if (cudnnGetVersion() < kOldest) {
    throw user_error("attention: cuDNN {} is too old, {} or newer is needed", cudnnGetVersion(), kOldest);
  }
  cudnnHandle_t handle = nullptr;
  check(cudnnCreate(&handle), "cudnnCreate");
  handle_ = handle;
}

AttentionPlans::~AttentionPlans() {
  graphs_.clear();
  cudnnDestroy(cudnn(handle_));
}

const AttentionGraph& AttentionPlans::find_or_build(const AttentionGraphKey& key) {
  const auto found = graphs_.find(key);
  if (found != graphs_.end()) return *found->second;
  return *graphs_.emplace(key, std::make_unique<AttentionGraph>(key, cudnn(handle_))).first->second;
}

size_t AttentionPlans::workspace_bytes(const AttentionGraph& graph) const {
  return graph.workspace_bytes();
}

void AttentionPlans::run(const AttentionGraph& graph, cudaStream_t stream,
                         const AttentionBuffers& buffers) const {
  check(cudnnSetStream(cudnn(handle_), stream), "cudnnSetStream");
  graph.run(cudnn(handle_), buffers);
}

}  // namespace biomoe::cuda
