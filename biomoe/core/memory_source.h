// Where arenas get their memory from: the host, or a device.
#pragma once

#include <cstddef>

namespace biomoe {

class MemorySource {
 public:
  virtual ~MemorySource() = default;
  // Memory that reads as zero. Throws Error(kFailure) with the byte count when the system refuses it.
  virtual void* reserve(size_t bytes, const char* name) = 0;
  virtual void free(void* memory, size_t bytes) noexcept = 0;
  // Sets every byte, after all work that was given to the device before (sync).
  virtual void fill(void* memory, unsigned char byte, size_t bytes) = 0;
};

// Pages of the host.
MemorySource& host_memory();

}  // namespace biomoe
