// Stands in for dist/nccl where the program is built without NCCL.
#include "biomoe/core/error.h"
#include "biomoe/dist/gpus.h"

namespace biomoe::nccl {
namespace {

Error no_nccl() {
  return user_error("ranks on GPUs: this biomoe was built without NCCL; set device=cpu");
}

}  // namespace

std::unique_ptr<Comm> over_gpus(std::unique_ptr<Comm>, double, bool) {
  throw no_nccl();
}

std::string library() {
  return "";
}

std::unique_ptr<PeerMemory> share_memory(Comm&, void*) {
  throw no_nccl();
}

bool can_share_memory(Comm&) {
  return false;
}

}  // namespace biomoe::nccl
