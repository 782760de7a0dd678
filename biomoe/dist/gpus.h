// What ranks with a GPU each have beside the messages of their hosts: collectives over NCCL, and memory of
// the other GPUs of a host.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/dist/comm.h"

namespace biomoe {

// Memory of this rank's GPU that the other ranks of a group read and write directly, and theirs. The mappings
// end with this object; the memory itself belongs to whoever reserved it, and outlives it.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // Where each rank's memory begins, by rank; a rank's own is what it gave.
  const std::vector<void*>& bases() const { return bases_; }

 protected:
  std::vector<void*> bases_;
};

namespace nccl {
// Multiprocessors that collectives of a twin (Comm::twin) take at most from the work that they run beside.
constexpr int kBlocksBeside = 8;

// `host`, whose collectives on tensors of a GPU go through NCCL, on the stream of the context: they are given
// out and not waited for, and can be recorded once each kind of them has been made once. NCCL's group is made
// at the first of them, by all ranks together. Sums are in an order that NCCL chooses: the same bits on all
// ranks, and again in a run with as many ranks. Element types: those of Comm, and bf16. NCCL uses no NVLink
// multicast. share_gpus: ranks may be on one GPU, which NCCL refuses within a host, so each passes for a host
// of its own and messages go through sockets. Throws user_error where the program was built without NCCL
// (dist/no_nccl).
std::unique_ptr<Comm> over_gpus(std::unique_ptr<Comm> host, double timeout_s, bool share_gpus);
// "NCCL 2.28", or "" where the program was built without it.
std::string library();

// Shares `base`, the beginning of memory that the device's source reserved (see device_memory), among the
// ranks of a group, all of which call this together. Throws user_error when they are not on one host or the
// GPUs cannot reach each other's memory; then it does so on all ranks.
std::unique_ptr<PeerMemory> share_memory(Comm& comm, void* base);
// Whether they can: tries it.
bool can_share_memory(Comm& comm);
}  // namespace nccl

}  // namespace biomoe
