// Counts the allocations of a warm step, in a program of its own because it replaces operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/unit/model/model_test_util.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

void* operator new(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace biomoe {
namespace {

void step(Model& model, const Batch& batch) {
  model.start_step(1.0 / batch.target_weight);
  model.reset_sums();
  const DeviceBatch& views = model.upload(batch);
  model.count_routing(views);
  model.forward(views, false);
  model.loss(views, true);
  model.backward(views, 0.02, 0.001);
  model.finish_step(0.02);
}

TEST(ModelAllocation, AWarmStepAllocatesNothing) {
  for (const auto mode : {ExpertFfnMode::kLoop, ExpertFfnMode::kGroupedLinear}) {
    for (const bool tied : {false, true}) {
      ModelConfig config = test::small_config();
      config.tie_word_embeddings = tied;
      ModelLimits limits = test::small_limits();
      limits.expert_ffn_mode = mode;
      limits.num_threads = 2;
      limits.recompute_layers = 1;
      Model model(config, limits);
      model.initialize(5);
      // Same tokens, other routings and record lengths. Both run before the count: the matrix library makes a
      // kernel the first time that it meets a kind of shape.
      const Batch first = test::random_batch(config, {300, 100}, 31),
                  second = test::random_batch(config, {20, 380}, 32);
      step(model, first);
      step(model, second);
      const int64_t before = allocations.load();
      step(model, first);
      step(model, second);
      const int64_t made = allocations.load() - before;
      EXPECT_EQ(made, 0) << kExpertFfnModeNames[static_cast<size_t>(mode)] << " tied " << tied;
    }
  }
}

// Of the mode that training uses: batches of sizes and routings never met before.
TEST(ModelAllocation, ANewBatchAllocatesNothing) {
  const ModelConfig config = test::small_config();
  ModelLimits limits = test::small_limits();
  limits.num_threads = 2;
  Model model(config, limits);
  model.initialize(5);
  step(model, test::random_batch(config, {300, 100}, 31));
  for (const int64_t length : {399, 380, 257, 130, 61}) {
    const Batch batch = test::random_batch(config, {length, 9}, static_cast<uint64_t>(length));
    const int64_t before = allocations.load();
    step(model, batch);
    EXPECT_EQ(allocations.load() - before, 0) << length;
  }
}

}  // namespace
}  // namespace biomoe
