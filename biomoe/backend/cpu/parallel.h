// Sharing work over ctx.num_threads OpenMP threads. What a body computes for an item must not depend on which
// thread computes it; then results are the same for any number of threads.
// A body must not throw: an exception cannot leave a parallel region.
// Every region has all ctx.num_threads threads, idle ones too: OpenMP's runtime allocates when the size of a
// team changes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "biomoe/core/context.h"

namespace biomoe::cpu {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
};

// Part `part` of [0, count) cut into `parts` contiguous ranges whose sizes differ by at most one.
inline Range split_range(int64_t count, int64_t parts, int64_t part) {
  const int64_t size = count / parts;
  const int64_t larger = count % parts;
  const int64_t begin = part * size + std::min(part, larger);
  return {begin, begin + size + (part < larger ? 1 : 0)};
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// body(Range) over [0, count), one contiguous range a thread, none below min_per_thread items (so that small
// work stays on the calling thread). The borders move with the number of threads: for elementwise work.
template <typename Body>
void parallel_ranges(const Context& ctx, int64_t count, int64_t min_per_thread, const Body& body) {
  if (count <= 0) return;
  const int64_t useful = std::max<int64_t>(1, count / std::max<int64_t>(1, min_per_thread));
  const int threads = static_cast<int>(std::min<int64_t>(ctx.num_threads, useful));
  if (threads <= 1) {
    body(Range{0, count});
    return;
  }
#pragma omp parallel for num_threads(ctx.num_threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) body(split_range(count, threads, part));
}

// body(item, thread) for every item of [0, count), handed out in order as threads become free; 0 <= thread <
// ctx.num_threads names the scratch a body may use. The last thread does what ctx.side_work has first, for as
// long as there are items enough to keep the others busy.
template <typename Body>
void parallel_items(const Context& ctx, int64_t count, const Body& body) {
  if (count <= 0) return;
  const int threads = static_cast<int>(std::clamp<int64_t>(count, 1, std::max(1, ctx.num_threads)));
  if (threads == 1) {
    for (int64_t item = 0; item < count; ++item) body(item, 0);
    return;
  }
  int64_t next = 0;
  const auto enough_left = [&] {
    int64_t given_out = 0;
#pragma omp atomic read
    given_out = next;
    return given_out + threads <= count;
  };
#pragma omp parallel for num_threads(ctx.num_threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    for (;;) {
      if (ctx.side_work && thread + 1 == threads) {
        while (enough_left() && ctx.side_work->do_piece()) {
        }
      }
      int64_t item = 0;
#pragma omp atomic capture
      item = next++;
      if (item >= count) break;
      body(item, thread);
    }
  }
}

}  // namespace biomoe::cpu
