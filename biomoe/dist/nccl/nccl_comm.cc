#include <cuda_runtime.h>
#include <nccl.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "biomoe/core/error.h"
#include "biomoe/dist/gpus.h"
#include "biomoe/dist/watchdog.h"

namespace biomoe::nccl {
namespace {

void check(ncclResult_t result, std::string_view what) {
  if (result == ncclSuccess) return;
  throw failure("{}: NCCL says: {} ({})", what, ncclGetErrorString(result), ncclGetLastError(nullptr));
}

void check(cudaError_t error, std::string_view what) {
  if (error != cudaSuccess) throw failure("{}: {}", what, cudaGetErrorString(error));
}

ncclDataType_t type_of(DType dtype, std::string_view what) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kF64:
      return ncclFloat64;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kI64:
      return ncclInt64;
    case DType::kI32:
      return ncclInt32;
    case DType::kU8:
      return ncclUint8;
    default:
      throw failure("{}: {} does not go over ranks", what, dtype_name(dtype));
  }
}

ncclRedOp_t op_of(ReduceOp op) {
  return op == ReduceOp::kSum ? ncclSum : ncclMax;
}

cudaStream_t stream_of(const Context& ctx) {
  return static_cast<cudaStream_t>(ctx.stream);
}

size_t count_of(const TensorView& x, std::string_view what) {
  BM_CHECK(x.contiguous(), "{}: not contiguous", what);
  return static_cast<size_t>(x.num_elements());
}

// NCCL's own group. It takes memory on every GPU, so ranks that are all the same share one.
struct Group {
  ncclComm_t comm = nullptr;
  int most_blocks = 0;  // of its kernels, one a multiprocessor; 0: NCCL's choice
  // Without waiting for the others: one of them may have died.
  ~Group() {
    if (comm) ncclCommAbort(comm);
  }
};

class NcclComm : public Comm {
 public:
  NcclComm(std::unique_ptr<Comm> host, double timeout_s, std::shared_ptr<Group> group)
      : host_(std::move(host)), timeout_s_(timeout_s), group_(std::move(group)) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  void barrier(std::string_view what) override { host_->barrier(what); }
  std::unique_ptr<Comm> split(int64_t colour, int64_t key) override {
    auto part = host_->split(colour, key);
    const int64_t moved = part->size() != size() || part->rank() != rank();
    const bool same = all_reduce_value(*host_, moved, ReduceOp::kMax, "a split of ranks") == 0;
    auto group = same ? group_ : std::make_shared<Group>();
    group->most_blocks = group_->most_blocks;
    return std::make_unique<NcclComm>(std::move(part), timeout_s_, std::move(group));
  }

  std::unique_ptr<Comm> twin() override {
    auto group = std::make_shared<Group>();
    group->most_blocks = kBlocksBeside;
    return std::make_unique<NcclComm>(host_->split(0, rank()), timeout_s_, std::move(group));
  }

  void all_reduce(Context& ctx, const TensorView& x, ReduceOp op, std::string_view what) override {
    if (ctx.device == Device::kCpu) return host_->all_reduce(ctx, x, op, what);
    if (size() == 1 || x.num_elements() == 0) return;
    check(ncclAllReduce(x.data, x.data, count_of(x, what), type_of(x.dtype, what), op_of(op), comm(),
                        stream_of(ctx)),
          what);
  }

  void all_gather(Context& ctx, const TensorView& send, const TensorView& receive,
                  std::string_view what) override {
    if (ctx.device == Device::kCpu) return host_->all_gather(ctx, send, receive, what);
    check_parts(send, receive, what);
    if (send.num_elements() == 0) return;
    if (size() == 1) return copy(ctx, send, receive, what);
    check(ncclAllGather(send.data, receive.data, count_of(send, what), type_of(send.dtype, what), comm(),
                        stream_of(ctx)),
          what);
  }

  void reduce_scatter(Context& ctx, const TensorView& send, const TensorView& receive, ReduceOp op,
                      std::string_view what) override {
    if (ctx.device == Device::kCpu) return host_->reduce_scatter(ctx, send, receive, op, what);
    check_parts(receive, send, what);
    if (receive.num_elements() == 0) return;
    if (size() == 1) return copy(ctx, send, receive, what);
    check(ncclReduceScatter(send.data, receive.data, count_of(receive, what), type_of(send.dtype, what),
                            op_of(op), comm(), stream_of(ctx)),
          what);
  }

  void all_to_all_v(Context& ctx, const AllToAllV& args, std::string_view what) override {
    if (ctx.device == Device::kCpu) return host_->all_to_all_v(ctx, args, what);
    const size_t row = static_cast<size_t>(args.send.row_elements()) * dtype_size(args.send.dtype);
    const auto at = [row](const TensorView& rows, const RowSegment& segment) {
      return static_cast<unsigned char*>(rows.data) + static_cast<size_t>(segment.begin) * row;
    };
    ncclComm_t all = comm();  // between ncclGroupStart and ncclGroupEnd it could not be made
    check(ncclGroupStart(), what);
    for (const RowSegment& segment : args.send_segments) {
      if (segment.count == 0) continue;
      check(ncclSend(at(args.send, segment), static_cast<size_t>(segment.count) * row, ncclUint8,
                     static_cast<int>(segment.peer), all, stream_of(ctx)),
            what);
    }
    for (const RowSegment& segment : args.receive_segments) {
      if (segment.count == 0) continue;
      check(ncclRecv(at(args.receive, segment), static_cast<size_t>(segment.count) * row, ncclUint8,
                     static_cast<int>(segment.peer), all, stream_of(ctx)),
            what);
    }
    check(ncclGroupEnd(), what);
  }

  void broadcast(Context& ctx, const TensorView& x, int root, std::string_view what) override {
    if (ctx.device == Device::kCpu) return host_->broadcast(ctx, x, root, what);
    if (size() == 1 || x.num_elements() == 0) return;
    check(ncclBroadcast(x.data, x.data, count_of(x, what), type_of(x.dtype, what), root, comm(),
                        stream_of(ctx)),
          what);
  }

 private:
  void check_parts(const TensorView& part, const TensorView& whole, std::string_view what) const {
    BM_CHECK(part.dtype == whole.dtype && part.num_elements() * size() == whole.num_elements(),
             "{}: {} elements for {} ranks with {}", what, whole.num_elements(), size(), part.num_elements());
  }

  void copy(Context& ctx, const TensorView& from, const TensorView& to, std::string_view what) {
    if (from.data == to.data) return;
    check(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice, stream_of(ctx)), what);
  }

  // Made at the first use: most runs need fewer groups than they have.
  ncclComm_t comm() {
    if (group_->comm) return group_->comm;
    constexpr const char* kWhat = "start-up of NCCL";
    ncclUniqueId id{};
    if (rank() == 0) check(ncclGetUniqueId(&id), kWhat);
    std::string text(id.internal, sizeof(id.internal));
    text = broadcast_text(*host_, text, 0, kWhat);
    std::memcpy(id.internal, text.data(), sizeof(id.internal));
    const Watchdog watchdog(timeout_s_,
                            fmt::format("rank {}: {} did not complete within {:.3g} s: waiting for the other "
                                        "ranks' GPUs",
                                        rank(), kWhat, timeout_s_));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (group_->most_blocks > 0) config.maxCTAs = group_->most_blocks;
    check(ncclCommInitRankConfig(&group_->comm, size(), id, rank(), &config), kWhat);
    return group_->comm;
  }

  std::unique_ptr<Comm> host_;
  double timeout_s_;
  std::shared_ptr<Group> group_;
};

// Memory of other processes, mapped by CUDA's handles.
class IpcMemory : public PeerMemory {
 public:
  IpcMemory(std::vector<void*> bases, int rank) : rank_(rank) { bases_ = std::move(bases); }
  ~IpcMemory() override {
    for (size_t i = 0; i < bases_.size(); ++i) {
      if (static_cast<int>(i) != rank_ && bases_[i]) cudaIpcCloseMemHandle(bases_[i]);
    }
  }

 private:
  int rank_;
};

}  // namespace

std::unique_ptr<Comm> over_gpus(std::unique_ptr<Comm> host, double timeout_s, bool share_gpus) {
  // Multicast takes memory of its own and is not there on every host that has NVLink.
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (share_gpus) setenv("NCCL_HOSTID", fmt::format("biomoe-rank-{}", host->rank()).c_str(), 1);
  return std::make_unique<NcclComm>(std::move(host), timeout_s, std::make_shared<Group>());
}

std::string library() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "NCCL";
  return fmt::format("NCCL {}.{}", version / 10000, version / 100 % 100);
}

std::unique_ptr<PeerMemory> share_memory(Comm& comm, void* base) {
  constexpr const char* kWhat = "the exchange of memory between GPUs";
  cudaIpcMemHandle_t handle{};
  std::string problem;
  if (const cudaError_t error = cudaIpcGetMemHandle(&handle, base); error != cudaSuccess)
    problem = cudaGetErrorString(error);
  const auto handles = all_gather_text(comm, std::string(handle.reserved, sizeof(handle.reserved)), kWhat);
  std::vector<void*> bases(handles.size());
  bases[static_cast<size_t>(comm.rank())] = base;
  for (size_t peer = 0; peer < handles.size() && problem.empty(); ++peer) {
    if (static_cast<int>(peer) == comm.rank()) continue;
    std::memcpy(handle.reserved, handles[peer].data(), sizeof(handle.reserved));
    const cudaError_t error = cudaIpcOpenMemHandle(&bases[peer], handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) problem = fmt::format("of rank {}: {}", peer, cudaGetErrorString(error));
  }
  cudaGetLastError();  // the runtime keeps the error for the next call otherwise
  auto memory = std::make_unique<IpcMemory>(std::move(bases), comm.rank());
  const auto problems = all_gather_text(comm, problem, kWhat);
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty()) continue;
    throw user_error("rank {} cannot reach the memory of another GPU ({})", rank, problems[rank]);
  }
  return memory;
}

bool can_share_memory(Comm& comm) {
  constexpr size_t kBytes = size_t{2} << 20;
  void* memory = nullptr;
  check(cudaMalloc(&memory, kBytes), "memory to share");
  bool can = true;
  try {
    share_memory(comm, memory);
  } catch (const Error&) {
    can = false;
  }
  comm.barrier("the exchange of memory between GPUs");  // nobody has it mapped any more
  cudaFree(memory);
  return can;
}

}  // namespace biomoe::nccl
