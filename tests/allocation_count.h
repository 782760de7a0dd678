// Counts every allocation of a program on the host, by whatever library, and keeps where they came from. For
// one file of a program of its own, because it replaces malloc.
#pragma once

#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace biomoe::test {

inline std::atomic<int64_t> allocations{0};

// The calls that led to allocations, between start() and stop(); not under a sanitizer.
class AllocationTrace {
 public:
  static void start() {
    std::array<void*, 1> frame;
    backtrace(frame.data(), 1);  // the first call allocates
    next_ = 0;
    tracing_ = true;
  }
  static void stop() { tracing_ = false; }

  // `caller`: who called malloc.
  static void add(void* caller) {
    thread_local bool inside = false;
    if (!tracing_ || inside) return;
    inside = true;
    const size_t at = next_.fetch_add(1);
    if (at < stacks_.size()) {
      Stack& stack = stacks_[at];
      stack.caller = caller;
      stack.depth = backtrace(stack.frames.data(), static_cast<int>(stack.frames.size()));
    }
    inside = false;
  }

  static size_t count() { return next_; }
  static bool complete() { return next_ <= stacks_.size(); }

  // Where this program itself, and no library that it called, allocated: one line each, of addresses for
  // addr2line. The C++ library allocates for whoever called it.
  static std::vector<std::string> of_program() {
    Dl_info program{};
    dladdr(reinterpret_cast<void*>(&AllocationTrace::stop), &program);
    std::vector<std::string> lines;
    for (size_t at = 0; at < std::min<size_t>(next_, stacks_.size()); ++at) {
      const Stack& stack = stacks_[at];
      std::string line;
      bool behind_caller = false, decided = false, own = false;
      for (int i = 0; i < stack.depth; ++i) {
        void* frame = stack.frames[static_cast<size_t>(i)];
        behind_caller = behind_caller || frame == stack.caller;
        Dl_info module{};
        if (!behind_caller || dladdr(frame, &module) == 0) continue;
        const std::string_view file = module.dli_fname;
        const bool runtime = file.find("libstdc++") != file.npos || file.find("libc.so") != file.npos;
        if (!decided && !runtime) {
          decided = true;
          own = module.dli_fbase == program.dli_fbase;
        }
        const auto offset = static_cast<char*>(frame) - static_cast<char*>(module.dli_fbase);
        line += fmt::format(" {}+{:#x}", file.substr(file.rfind('/') + 1), offset);
      }
      if (own) lines.push_back(line);
    }
    return lines;
  }

 private:
  struct Stack {
    void* caller;
    int depth;
    std::array<void*, 16> frames;
  };
  static inline std::array<Stack, 8192> stacks_{};
  static inline std::atomic<size_t> next_{0};
  static inline std::atomic<bool> tracing_{false};
};

inline void count_allocation(void* caller) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  AllocationTrace::add(caller);
}

}  // namespace biomoe::test

#if defined(__SANITIZE_ADDRESS__)
// The sanitizer's own allocator stays; it tells of each call.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, size_t),
                                                         void (*on_free)(const volatile void*));
namespace {
const int hooks = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void*, size_t) { biomoe::test::allocations.fetch_add(1, std::memory_order_relaxed); },
    [](const volatile void*) {});
}
#else
// glibc's functions under their other names. operator new calls malloc.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) noexcept {
  biomoe::test::count_allocation(__builtin_return_address(0));
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) noexcept {
  biomoe::test::count_allocation(__builtin_return_address(0));
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, size_t bytes) noexcept {
  biomoe::test::count_allocation(__builtin_return_address(0));
  return __libc_realloc(memory, bytes);
}
void* memalign(size_t alignment, size_t bytes) noexcept {
  biomoe::test::count_allocation(__builtin_return_address(0));
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  biomoe::test::count_allocation(__builtin_return_address(0));
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, size_t alignment, size_t bytes) noexcept {
  biomoe::test::count_allocation(__builtin_return_address(0));
  *memory = __libc_memalign(alignment, bytes);
  return *memory ? 0 : ENOMEM;
}
}
#endif
