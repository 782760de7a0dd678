#include "biomoe/core/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace biomoe {

Arena::Arena(size_t capacity_bytes, const char* name) : capacity_(align_up(capacity_bytes)), name_(name) {
  if (capacity_ == 0) return;
  void* memory = mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw failure("cannot reserve {} bytes of memory for {}: {}", capacity_, name_, std::strerror(errno));
  }
  // Large pages save most TLB misses of the GEMM operands; a refusal changes nothing but speed.
  madvise(memory, capacity_, MADV_HUGEPAGE);
  base_ = static_cast<uint8_t*>(memory);
}

Arena::~Arena() {
  if (base_) munmap(base_, capacity_);
}

Arena::Arena(Arena&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      used_(std::exchange(other.used_, 0)),
      peak_(std::exchange(other.peak_, 0)),
      name_(other.name_) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(capacity_, other.capacity_);
  std::swap(used_, other.used_);
  std::swap(peak_, other.peak_);
  std::swap(name_, other.name_);
  return *this;
}

void* Arena::allocate(size_t bytes) {
  const size_t size = align_up(bytes);
  BM_CHECK(size <= capacity_ - used_, "{} is planned at {} bytes, {} are in use and {} more were asked for",
           name_, capacity_, used_, size);
  void* start = base_ + used_;
  used_ += size;
  peak_ = std::max(peak_, used_);
  return start;
}

TensorView Arena::tensor(DType dtype, Shape shape) {
  void* data = allocate(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype));
  return TensorView(data, dtype, shape);
}

void Arena::release(size_t mark) {
  BM_CHECK(mark <= used_, "{} released out of order: mark {} is above {}", name_, mark, used_);
  used_ = mark;
}

void Arena::poison_free() {
  // 0xFF bytes are a NaN in fp32, bf16, fp16 and fp64, and -1 as an index.
  if (base_) std::memset(base_ + used_, 0xff, capacity_ - used_);
}

}  // namespace biomoe
