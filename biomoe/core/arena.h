// Arena: one block of memory, allocated once, handed out by a moving offset.
#pragma once

#include <cstddef>
#include <cstdint>

#include "biomoe/core/memory_source.h"
#include "biomoe/core/tensor_view.h"

namespace biomoe {

inline constexpr size_t kArenaAlignment = 128;  // bytes; a cache-line pair, and enough for every vector load

constexpr size_t align_up(size_t bytes, size_t alignment = kArenaAlignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Gives out tensors: from real memory (Arena) or by counting only (ArenaPlanner), so that the code which lays
// memory out is also the code which plans it.
class TensorAllocator {
 public:
  virtual ~TensorAllocator() = default;
  virtual TensorView tensor(DType dtype, Shape shape) = 0;
};

// Counts the bytes that the same calls would take from an Arena; the views it returns must not be read.
class ArenaPlanner : public TensorAllocator {
 public:
  TensorView tensor(DType dtype, Shape shape) override {
    used_ += align_up(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype));
    return TensorView(nullptr, dtype, shape);
  }
  size_t used() const { return used_; }

 private:
  size_t used_ = 0;
};

// Bytes that `lay_out(allocator)` takes of an arena.
template <typename LayOut>
size_t planned_bytes(const LayOut& lay_out) {
  ArenaPlanner planner;
  lay_out(planner);
  return planner.used();
}

// Not thread-safe. Memory is page-aligned, reads as zero until written, and is the host's unless another
// source is given. Move-only.
class Arena : public TensorAllocator {
 public:
  Arena() = default;
  // Throws Error(kFailure) with the byte count when the system refuses the memory.
  explicit Arena(size_t capacity_bytes, const char* name = "arena", MemorySource& source = host_memory());
  ~Arena() override;
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Never allocates from the system; throws when the planned capacity is exceeded.
  void* allocate(size_t bytes);
  TensorView tensor(DType dtype, Shape shape) override;

  // Scoped use: everything allocated after mark() is given back by release(mark).
  size_t mark() const { return used_; }
  void release(size_t mark);

  // Fills what is not in use with a pattern that reads as NaN in every floating-point type, so that a value
  // read before it is written cannot pass for a result.
  void poison_free();

  uint8_t* base() const { return base_; }
  size_t capacity() const { return capacity_; }
  size_t used() const { return used_; }
  size_t peak() const { return peak_; }

 private:
  uint8_t* base_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
  size_t peak_ = 0;
  const char* name_ = "arena";
  MemorySource* source_ = nullptr;
};

// Gives scratch memory back at the end of a scope.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  size_t mark_;
};

}  // namespace biomoe
