// GrowingBytes: an array of bytes that grows without ever being in memory twice.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <utility>

namespace biomoe {

// A std::vector copies itself when it grows, so that a genome would need up to three times its bytes while it
// is read. realloc moves the pages of a large block instead. What is reserved beyond size() is not touched.
class GrowingBytes {
 public:
  GrowingBytes() = default;
  GrowingBytes(GrowingBytes&& other) noexcept { swap(other); }
  GrowingBytes& operator=(GrowingBytes&& other) noexcept {
    swap(other);
    return *this;
  }

  const char* data() const { return data_.get(); }
  size_t size() const { return size_; }

  void append(std::string_view bytes) {
    if (bytes.empty()) return;
    if (bytes.size() > capacity_ - size_) grow(bytes.size());
    std::memcpy(data_.get() + size_, bytes.data(), bytes.size());
    size_ += bytes.size();
  }
  void clear() { size_ = 0; }  // capacity kept
  void free() { GrowingBytes().swap(*this); }

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  void swap(GrowingBytes& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }
  void grow(size_t more) {
    const size_t wanted = std::max({size_ + more, capacity_ + capacity_ / 2, size_t{4096}});
    char* before = data_.release();
    void* moved = std::realloc(before, wanted);
    data_.reset(moved != nullptr ? static_cast<char*>(moved) : before);
    if (moved == nullptr) throw std::bad_alloc();
    capacity_ = wanted;
  }

  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace biomoe
