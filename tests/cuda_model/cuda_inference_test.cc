// Inference on the GPU: decoding step by step against the whole context, and evaluation against the CPU.
#include "biomoe/data/dataset.h"
#include "biomoe/model/decoder.h"
#include "biomoe/model/parameter_io.h"
#include "biomoe/train/evaluation.h"
#include "biomoe/train/generate.h"
#include "biomoe/train/model_image.h"
#include "tests/cuda/gpu_test.h"
#include "tests/test_folder.h"
#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

using namespace test;

struct Case {
  ExpertFfnMode mode = ExpertFfnMode::kFusedGroupedMlp;
  std::optional<int64_t> window = {};
  bool tied = false;
  int64_t width = 16;  // of a head
};

ModelConfig config_of(const Case& c) {
  ModelConfig config = small_config();
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = c.width;
  config.sliding_window = c.window;
  config.tie_word_embeddings = c.tied;
  config.initializer_range = 0.1;  // larger weights amplify the rounding of BF16 from layer to layer
  // Every token goes to every expert: with fewer, rounding to BF16 turns near ties.
  config.num_experts_per_tok = config.num_local_experts;
  return config;
}

std::unique_ptr<Model> model_on(Device device, const ModelConfig& config, ExpertFfnMode mode,
                                int64_t tokens) {
  ModelLimits limits = small_limits(tokens, tokens);
  limits.training = false;
  limits.expert_ffn_mode = mode;
  limits.device = device;
  auto model = std::make_unique<Model>(config, limits);
  model->initialize(7);
  return model;
}

class CudaDecoderTest : public testing::TestWithParam<Case> {};

// 600 tokens are more than one piece of a prompt.
TEST_P(CudaDecoderTest, EveryStepGivesTheLogitsOfTheWholeContext) {
  BIOMOE_REQUIRE_GPU();
  constexpr int64_t kTokens = 620;
  const ModelConfig config = config_of(GetParam());
  const auto cpu = model_on(Device::kCpu, config, ExpertFfnMode::kGroupedLinear, kTokens);
  const auto gpu = model_on(Device::kCuda, config, GetParam().mode, kTokens);
  const Batch batch = random_batch(config, {kTokens}, 3);
  const std::vector<float> whole = logits_of(*cpu, batch);
  Decoder decoder(*gpu);
  for (const int64_t prompt : {int64_t{1}, int64_t{2}, int64_t{70}, kTokens - 20}) {
    decoder.poison();
    std::vector<float> got, want;
    int64_t count = prompt;
    const int64_t end = std::min(kTokens, prompt + 20);
    while (decoder.length() < end) {
      const std::span<const int32_t> tokens(batch.tokens.data() + decoder.length(),
                                            static_cast<size_t>(count));
      const std::vector<float> logits = values_of(decoder.extend(tokens));
      got.insert(got.end(), logits.begin(), logits.end());
      const auto row = whole.begin() + (decoder.length() - 1) * config.vocab_size;
      want.insert(want.end(), row, row + config.vocab_size);
      count = 1;
    }
    EXPECT_LE(norm_error(got, want), 2e-2) << "prompt of " << prompt;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaDecoderTest,
                         testing::Values(Case{}, Case{ExpertFfnMode::kLoop, 33},
                                         Case{ExpertFfnMode::kGroupedLinear, 200, true},
                                         Case{ExpertFfnMode::kFusedGroupedMlp, {}, false, 80},
                                         Case{ExpertFfnMode::kFusedGroupedMlp, 64, false, 256}));

TEST(CudaDecoder, TheSameCallsGiveTheSameLogits) {
  BIOMOE_REQUIRE_GPU();
  const ModelConfig config = config_of({});
  const auto model = model_on(Device::kCuda, config, ExpertFfnMode::kFusedGroupedMlp, 100);
  const Batch batch = random_batch(config, {100}, 3);
  std::vector<float> first;
  Decoder decoder(*model);
  for (int run = 0; run < 3; ++run) {
    decoder.poison();
    decoder.extend({batch.tokens.data(), 90});
    const std::vector<float> logits = values_of(decoder.extend({batch.tokens.data() + 90, 1}));
    if (run == 0) first = logits;
    EXPECT_EQ(logits, first);
  }
}

TEST(CudaEvaluation, IsThatOfTheCpu) {
  BIOMOE_REQUIRE_GPU();
  const TempFolder folder;
  DataConfig data;
  data.tokenizer_name_or_path = "dna";
  data.max_seq_length = 128;
  data.token_micro_batch_size = 512;
  data.stride = 0;
  std::string text;
  for (int record = 0; record < 5; ++record) {
    text += ">r" + std::to_string(record) + "\n";
    const Rng rng(5, RngStream::kTest, static_cast<uint32_t>(record));
    for (uint64_t i = 0; i < 700; ++i) text += "ACGTN"[rng.u64(i) % (i % 9 == 0 ? 5 : 4)];
    text += "\n";
  }
  data.path = {folder.write("x.fa", text)};
  const Vocabulary vocabulary = Vocabulary::open(data.tokenizer_name_or_path, data.soft_masked);
  const auto part = open_sequences(data.path, data, vocabulary);
  ModelConfig config = config_of({});
  config.vocab_size = vocabulary.size();
  const auto cpu = model_on(Device::kCpu, config, ExpertFfnMode::kGroupedLinear, 512);
  const auto gpu = model_on(Device::kCuda, config, ExpertFfnMode::kFusedGroupedMlp, 512);
  const Evaluation want = evaluate(*cpu, part, vocabulary, validation_loader_options(data));
  const Evaluation got = evaluate(*gpu, part, vocabulary, validation_loader_options(data));
  EXPECT_GT(want.bases, 3000);
  EXPECT_EQ(got.bases, want.bases);
  EXPECT_NEAR(got.nats_per_base().value(), want.nats_per_base().value(), 5e-3);
  ASSERT_EQ(got.records.size(), want.records.size());
  for (size_t i = 0; i < got.records.size(); ++i) {
    EXPECT_EQ(got.records[i].bases, want.records[i].bases);
    EXPECT_NEAR(got.records[i].nats / static_cast<double>(got.records[i].bases),
                want.records[i].nats / static_cast<double>(want.records[i].bases), 1e-2);
  }
}

}  // namespace
}  // namespace biomoe
