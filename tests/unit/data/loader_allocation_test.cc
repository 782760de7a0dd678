// Counts the allocations of a warm loader, in a program of its own because it replaces operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "biomoe/data/loader.h"
#include "tests/unit/data/data_test_helpers.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

// Not inlined: the compiler would see malloc meet delete, and warn.
[[gnu::noinline]] void* operator new(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace biomoe {
namespace {

TEST(Loader, AllocatesNothingOnceWarm) {
  const auto store = std::make_shared<test::SyntheticStore>(std::vector<int64_t>{3000, 5, 70, 200});
  const auto part = std::make_shared<SequencePart>(
      SequencePart{store, WindowIndex(whole_records(*store), {.max_seq_length = 32, .stride = 4})});
  for (const int64_t workers : {0, 1, 4}) {
    LoaderOptions options;
    options.plan.token_micro_batch_size = 128;
    options.plan.reverse_complement_prob = 0.5;
    options.num_workers = workers;
    Loader loader(part, Vocabulary::dna(), options);
    Batch batch;
    std::vector<SequenceSource> sources;
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(loader.next(batch, &sources));
    const int64_t before = allocations.load();
    for (int i = 0; i < 200; ++i) ASSERT_TRUE(loader.next(batch, &sources));
    EXPECT_EQ(allocations.load() - before, 0) << workers;
  }
}

}  // namespace
}  // namespace biomoe
