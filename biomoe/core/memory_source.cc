#include "biomoe/core/memory_source.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

class HostMemory : public MemorySource {
 public:
  void* reserve(size_t bytes, const char* name) override {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw failure("cannot reserve {} bytes of memory for {}: {}", bytes, name, std::strerror(errno));
    }
    // Large pages save most TLB misses of the GEMM operands; a refusal changes nothing but speed.
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
  }
  void free(void* memory, size_t bytes) noexcept override { munmap(memory, bytes); }
  void fill(void* memory, unsigned char byte, size_t bytes) override { std::memset(memory, byte, bytes); }
};

}  // namespace

MemorySource& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace biomoe
