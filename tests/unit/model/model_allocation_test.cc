// Counts every allocation of a warm step, by whatever library.
#include <gtest/gtest.h>

#include <cstdlib>

#include "biomoe/model/decoder.h"
#include "tests/allocation_count.h"
#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

using test::allocations;

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

TEST(ModelAllocation, TheCountSeesEachWayToAllocate) {
  const int64_t before = allocations.load();
  void* volatile memory = std::malloc(100);
  std::free(memory);
  memory = std::calloc(10, 10);
  std::free(memory);
  memory = std::aligned_alloc(128, 1024);
  std::free(memory);
  memory = ::operator new(100);
  ::operator delete(memory);
  EXPECT_EQ(allocations.load() - before, 4);
}

TEST(ModelAllocation, AWarmStepAllocatesNothing) {
  for (const auto mode :
       {ExpertFfnMode::kLoop, ExpertFfnMode::kGroupedLinear, ExpertFfnMode::kFusedGroupedMlp}) {
    for (const bool tied : {false, true}) {
      ModelConfig config = test::small_config();
      config.tie_word_embeddings = tied;
      ModelLimits limits = test::small_limits();
      limits.expert_ffn_mode = mode;
      limits.num_threads = 3;
      limits.recompute_layers = 1;
      Model model(config, limits);
      model.initialize(5);
      // Same tokens, other routings and record lengths. Both run before the count: the first makes the
      // threads.
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

TEST(ModelAllocation, ADecodedTokenAllocatesNothing) {
  const ModelConfig config = test::small_config();
  ModelLimits limits = test::small_limits();
  limits.training = false;
  limits.num_threads = 2;
  Model model(config, limits);
  model.initialize(5);
  Decoder decoder(model);
  const Batch batch = test::random_batch(config, {400}, 31);
  const std::span<const int32_t> tokens = batch.tokens;
  decoder.extend(tokens.first(100));
  decoder.extend(tokens.subspan(100, 1));
  const int64_t before = allocations.load();
  for (size_t t = 101; t < tokens.size(); ++t) decoder.extend(tokens.subspan(t, 1));
  EXPECT_EQ(allocations.load() - before, 0);
}

}  // namespace
}  // namespace biomoe
