#include "biomoe/model/decoder.h"

#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

// What fp32 rounding may change in the norm of a sequence's logits: the bound that packed records have
// against records alone (model_test.cc). One row of 700 that is off by a ten-thousandth is above it.
constexpr double kRounding = 2e-6;

struct Case {
  const char* name;
  int64_t heads, kv_heads, width;
  int64_t capacity;
  std::optional<int64_t> window = {};
  int64_t layers = 3;
  int64_t top_k = 2;
  bool tied = false;
  ExpertFfnMode mode = ExpertFfnMode::kGroupedLinear;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

ModelConfig config_of(const Case& c) {
  ModelConfig config = test::small_config();
  config.num_attention_heads = c.heads;
  config.num_key_value_heads = c.kv_heads;
  config.head_dim = c.width;
  config.num_hidden_layers = c.layers;
  config.num_experts_per_tok = c.top_k;
  config.sliding_window = c.window;
  config.tie_word_embeddings = c.tied;
  return config;
}

ModelLimits limits_of(const Case& c, int num_threads = 2) {
  ModelLimits limits = test::small_limits(c.capacity, c.capacity);
  limits.training = false;
  limits.num_threads = num_threads;
  limits.expert_ffn_mode = c.mode;
  return limits;
}

// Logits after each call, for calls with `counts` tokens; memory is poisoned first.
std::vector<std::vector<float>> decode(Decoder& decoder, std::span<const int32_t> tokens,
                                       const std::vector<int64_t>& counts) {
  decoder.poison();
  std::vector<std::vector<float>> logits;
  for (const int64_t count : counts) {
    logits.push_back(test::values_of(
        decoder.extend(tokens.subspan(static_cast<size_t>(decoder.length()), static_cast<size_t>(count)))));
  }
  return logits;
}

// A first call of `prompt` tokens, then one token a call until `total`.
std::vector<int64_t> prompt_then_steps(int64_t prompt, int64_t total) {
  std::vector<int64_t> counts{prompt};
  counts.resize(static_cast<size_t>(total - prompt + 1), 1);
  return counts;
}

class DecoderTest : public testing::TestWithParam<Case> {
 protected:
  DecoderTest() : config_(config_of(GetParam())), model_(config_, limits_of(GetParam())) {
    model_.initialize(7);
    batch_ = test::random_batch(config_, {GetParam().capacity}, 3);
    full_ = test::logits_of(model_, batch_);
  }

  // The error of the logits of all calls against those rows of the whole context's forward pass.
  double error_of(const std::vector<int64_t>& counts) {
    Decoder decoder(model_);
    std::vector<float> got, want;
    for (const auto& logits : decode(decoder, batch_.tokens, counts)) {
      got.insert(got.end(), logits.begin(), logits.end());
    }
    int64_t length = 0;
    for (const int64_t count : counts) {
      length += count;
      const auto row = full_.begin() + (length - 1) * config_.vocab_size;
      want.insert(want.end(), row, row + config_.vocab_size);
    }
    return test::norm_error(got, want);
  }

  ModelConfig config_;
  Model model_;
  Batch batch_;
  std::vector<float> full_;
};

TEST_P(DecoderTest, EveryStepGivesTheLogitsOfTheWholeContext) {
  const int64_t total = GetParam().capacity;
  for (const int64_t prompt : {int64_t{1}, int64_t{2}, total / 2, total - 1, total}) {
    EXPECT_LE(error_of(prompt_then_steps(prompt, total)), kRounding) << "prompt of " << prompt;
  }
}

TEST_P(DecoderTest, PiecesOfAnySizeGiveTheLogitsOfTheWholeContext) {
  const int64_t total = GetParam().capacity;
  std::vector<int64_t> counts;
  for (int64_t count = 1, length = 0; length < total; length += counts.back(), count = count * 2 + 1) {
    counts.push_back(std::min(count, total - length));
  }
  EXPECT_LE(error_of(counts), kRounding);
}

TEST_P(DecoderTest, IsTheSameForAnyNumberOfThreadsAndAgainAfterReset) {
  const auto counts = prompt_then_steps(GetParam().capacity / 2, GetParam().capacity);
  std::vector<std::vector<float>> first;
  for (const int threads : {1, 2, 3}) {
    Model model(config_, limits_of(GetParam(), threads));
    model.initialize(7);
    Decoder decoder(model);
    const auto got = decode(decoder, batch_.tokens, counts);
    if (first.empty()) first = got;
    EXPECT_EQ(got, first) << threads << " threads";
    EXPECT_EQ(decode(decoder, batch_.tokens, counts), first) << "again";
  }
}

// 512 tokens run at a time, and attention goes by 512 keys: the last cases cross both.
INSTANTIATE_TEST_SUITE_P(
    Geometries, DecoderTest,
    testing::Values(Case{"grouped_query", 4, 2, 10, 40}, Case{"one_key_value_head", 6, 1, 8, 33},
                    Case{"as_many_key_value_heads", 3, 3, 6, 40}, Case{"one_layer", 4, 2, 10, 24, {}, 1},
                    Case{"window_of_one", 4, 2, 10, 20, 1}, Case{"short_window", 4, 2, 10, 40, 7},
                    Case{"window_beyond_the_context", 4, 2, 10, 40, 100},
                    Case{"top_1", 4, 2, 10, 40, {}, 3, 1}, Case{"all_experts", 4, 2, 10, 40, {}, 3, 5},
                    Case{"tied", 4, 4, 2, 40, {}, 2, 2, true},
                    Case{"loop", 4, 2, 10, 40, {}, 3, 2, false, ExpertFfnMode::kLoop},
                    Case{"long", 4, 2, 10, 700, {}, 2}, Case{"long_with_window", 4, 1, 10, 700, 90, 2}),
    [](const auto& tested) { return tested.param.name; });

const Case kSmall{"small", 4, 2, 10, 12};

TEST(Decoder, RefusesTokensBeyondItsCapacityAndKeepsWhatItHas) {
  const ModelConfig config = config_of(kSmall);
  Model model(config, limits_of(kSmall));
  model.initialize(7);
  Decoder decoder(model);
  const Batch batch = test::random_batch(config, {13}, 3);
  const std::span<const int32_t> tokens = batch.tokens;
  EXPECT_THROW(decoder.extend(tokens), Error);
  EXPECT_THROW(decoder.extend({}), Error);
  EXPECT_EQ(decoder.length(), 0);
  decoder.extend(tokens.first(11));
  EXPECT_THROW(decoder.extend(tokens.last(2)), Error);
  EXPECT_EQ(decoder.length(), 11);
  const auto got = test::values_of(decoder.extend(tokens.subspan(11, 1)));
  EXPECT_EQ(decoder.length(), decoder.capacity());
  EXPECT_THROW(decoder.extend(tokens.last(1)), Error);
  const auto full = test::logits_of(model, test::random_batch(config, {12}, 3));
  EXPECT_LE(test::norm_error(got, {full.end() - config.vocab_size, full.end()}), kRounding);
}

TEST(Decoder, LeavesTheModelsActivationsAlone) {
  const ModelConfig config = config_of(kSmall);
  Model model(config, limits_of(kSmall));
  model.initialize(7);
  const Batch batch = test::random_batch(config, {12}, 3);
  const auto want = test::logits_of(model, batch);
  std::vector<float> got(want.size());
  model.forward(model.upload(batch), false);
  Decoder decoder(model);
  decoder.extend(std::span<const int32_t>(batch.tokens).first(5));
  model.logits_sync(TensorView(got.data(), DType::kF32, {12, config.vocab_size}));
  EXPECT_EQ(got, want);
}

TEST(Decoder, PlansTheCacheByLayersRowsAndKeyValueHeads) {
  ModelConfig config = config_of(kSmall);
  config.head_dim = 16;  // rows that need no alignment
  const DecoderMemory memory = plan_decoder_memory(config, limits_of(kSmall));
  EXPECT_EQ(memory.cache, sizeof(float) * 3 * 12 * 2 * 2 * 16);
}

}  // namespace
}  // namespace biomoe
