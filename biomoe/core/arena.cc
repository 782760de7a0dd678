#include "biomoe/core/arena.h"

#include <algorithm>
#include <utility>

namespace biomoe {

Arena::Arena(size_t capacity_bytes, const char* name, MemorySource& source)
    : capacity_(align_up(capacity_bytes)), name_(name), source_(&source) {
  if (capacity_ > 0) base_ = static_cast<uint8_t*>(source.reserve(capacity_, name));
}

Arena::~Arena() {
  if (base_) source_->free(base_, capacity_);
}

Arena::Arena(Arena&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      used_(std::exchange(other.used_, 0)),
      peak_(std::exchange(other.peak_, 0)),
      name_(other.name_),
      source_(other.source_) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(capacity_, other.capacity_);
  std::swap(used_, other.used_);
  std::swap(peak_, other.peak_);
  std::swap(name_, other.name_);
  std::swap(source_, other.source_);
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
  if (base_) source_->fill(base_ + used_, 0xff, capacity_ - used_);
}

}  // namespace biomoe
