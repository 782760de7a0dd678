// How small a share of elementwise work is still worth a thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace biomoe::cpu {

// Starting a parallel region costs a few microseconds, in which one thread reads and writes about this many
// elements.
inline constexpr int64_t kMinElementsPerThread = 8192;

// For rows that cost as much as reading and writing `elements` elements each.
constexpr int64_t min_rows_per_thread(int64_t elements) {
  return kMinElementsPerThread / std::max<int64_t>(1, elements) + 1;
}

}  // namespace biomoe::cpu
