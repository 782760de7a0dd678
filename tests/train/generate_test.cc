#include "biomoe/train/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace biomoe {
namespace {

using ::testing::HasSubstr;

// A random model over the `dna` vocabulary whose next token is far from both certain and uniform.
LoadedModel make_model(int64_t window = 48, Vocabulary vocabulary = Vocabulary::dna(),
                       std::optional<int64_t> sliding_window = 20) {
  ModelConfig config;
  config.vocab_size = vocabulary.size();
  config.hidden_size = 24;
  config.intermediate_size = 20;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 10;
  config.num_local_experts = 5;
  config.num_experts_per_tok = 2;
  config.initializer_range = 0.3;
  config.sliding_window = sliding_window;
  LoadedModel loaded{
      std::make_unique<Model>(
          config,
          ModelLimits{.max_tokens = window, .max_seqlen = window, .num_threads = 2, .training = false}),
      std::move(vocabulary), DataConfig(), "", -1};
  loaded.model->initialize(11);
  return loaded;
}

void set_logit_row(LoadedModel& loaded, int32_t token, float value) {
  const TensorView head = loaded.model->weight(loaded.model->parameters().find("lm_head.weight"));
  std::fill_n(head.f32() + token * head.row_stride, head.row_stride, value);
}

// Makes greedy decoding never choose EOS, whose logit becomes 0 and lies below that of A or that of T.
void never_end(LoadedModel& loaded) {
  set_logit_row(loaded, *loaded.vocabulary.special().eos, 0.0f);
  const TensorView head = loaded.model->weight(loaded.model->parameters().find("lm_head.weight"));
  const float* a = head.rows(loaded.vocabulary.id('A'), 1).f32();
  float* t = head.rows(loaded.vocabulary.id('T'), 1).f32();
  std::transform(a, a + head.row_stride, t, [](float value) { return -value; });
}

// What may follow BOS + `text`, by a forward pass over all of it: bases and EOS with their logits, the most
// probable first.
struct Candidate {
  int32_t id;
  double logit;
};
std::vector<Candidate> candidates_after(LoadedModel& loaded, const std::string& text) {
  const Vocabulary& vocabulary = loaded.vocabulary;
  Batch batch;
  if (loaded.data.add_bos) batch.tokens.push_back(*vocabulary.special().bos);
  for (const char c : text) batch.tokens.push_back(vocabulary.id(static_cast<uint8_t>(c)));
  batch.positions.resize(batch.tokens.size());
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  batch.cu_seqlens = {0, static_cast<int32_t>(batch.tokens.size())};
  const int64_t V = loaded.model->config().vocab_size;
  std::vector<float> logits(batch.tokens.size() * static_cast<size_t>(V), NAN);
  loaded.model->forward(loaded.model->upload(batch), false);
  loaded.model->logits_sync(TensorView(logits.data(), DType::kF32, {batch.num_tokens(), V}));
  std::vector<Candidate> candidates;
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    if (id != *vocabulary.special().eos && !vocabulary.is_base(id)) continue;
    const size_t at = logits.size() - static_cast<size_t>(V - id);
    candidates.push_back({id, static_cast<double>(logits[at])});
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.logit > b.logit; });
  return candidates;
}

GenerateOptions options_of(const std::string& prompt, int64_t tokens, double temperature, uint64_t seed = 1) {
  GenerateOptions options;
  options.prompt = prompt;
  options.max_new_tokens = tokens;
  options.temperature = temperature;
  options.seed = seed;
  return options;
}

std::string text_of(LoadedModel& loaded, const GenerateOptions& options) {
  return generate(loaded, options).text;
}

// Each token of a text that generate() made, with what could have stood in its place.
template <typename Visit>
void for_each_draw(LoadedModel& loaded, const std::string& prompt, const std::string& text,
                   const Visit& visit) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto candidates = candidates_after(loaded, prompt + text.substr(0, i));
    const int32_t drawn = loaded.vocabulary.id(static_cast<uint8_t>(text[i]));
    const auto found = std::find_if(candidates.begin(), candidates.end(),
                                    [&](const Candidate& candidate) { return candidate.id == drawn; });
    ASSERT_NE(found, candidates.end()) << text[i] << " is not a base";
    visit(candidates, static_cast<size_t>(found - candidates.begin()));
  }
}

// A text may end early by itself; with several seeds there are draws enough.
constexpr int kSeeds = 12;

TEST(Generate, GreedyIsTheArgmaxOfTheWholeContextAtEveryStep) {
  LoadedModel loaded = make_model();
  size_t draws = 0;
  for (const std::string prompt : {"", "A", "GATTACA", "ACGTNACGTNACGTNACGTNACGTNACGTN"}) {
    const Generated result = generate(loaded, options_of(prompt, 100, 0));
    for_each_draw(loaded, prompt, result.text, [&](const auto&, size_t rank) {
      EXPECT_EQ(rank, 0u);
      ++draws;
    });
    if (result.stop == GenerateStop::kEos) {
      EXPECT_EQ(candidates_after(loaded, prompt + result.text).front().id, *loaded.vocabulary.special().eos);
    }
  }
  EXPECT_GT(draws, 40u);
}

TEST(Generate, TheSeedDecides) {
  LoadedModel loaded = make_model();
  std::set<std::string> texts;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const auto options = options_of("ACGT", 30, 1.5, static_cast<uint64_t>(seed));
    const std::string text = text_of(loaded, options);
    EXPECT_EQ(text_of(loaded, options), text) << "seed " << seed;
    LoadedModel again = make_model();
    EXPECT_EQ(text_of(again, options), text) << "seed " << seed;
    texts.insert(text);
  }
  EXPECT_GT(texts.size(), static_cast<size_t>(kSeeds) / 2);  // EOS may come first with several
}

TEST(Generate, TopKOfOneAndATinyTopPAreGreedy) {
  LoadedModel loaded = make_model();
  const std::string greedy = text_of(loaded, options_of("ACGT", 40, 0));
  ASSERT_GT(greedy.size(), 3u);
  size_t others = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    GenerateOptions options = options_of("ACGT", 40, 2.0, static_cast<uint64_t>(seed));
    others += text_of(loaded, options) != greedy ? 1 : 0;
    options.top_k = 1;
    EXPECT_EQ(text_of(loaded, options), greedy);
    options.top_k = 0;
    options.top_p = 1e-9;
    EXPECT_EQ(text_of(loaded, options), greedy);
    options.top_p = 1;
    options.temperature = 1e-6;
    EXPECT_EQ(text_of(loaded, options), greedy);
  }
  EXPECT_GT(others, 0u);
}

TEST(Generate, DrawsStayInsideTheTopKAndTheNucleus) {
  LoadedModel loaded = make_model();
  constexpr double kTemperature = 2.0, kTopP = 0.7;
  constexpr size_t kTopK = 3;
  size_t top_k_used = 0, nucleus_used = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    GenerateOptions options = options_of("TTGACA", 30, kTemperature, static_cast<uint64_t>(seed));
    options.top_k = kTopK;
    for_each_draw(loaded, options.prompt, text_of(loaded, options), [&](const auto&, size_t rank) {
      EXPECT_LT(rank, kTopK);
      top_k_used = std::max(top_k_used, rank);
    });
    options.top_k = 0;
    options.top_p = kTopP;
    for_each_draw(loaded, options.prompt, text_of(loaded, options),
                  [&](const std::vector<Candidate>& candidates, size_t rank) {
                    double sum = 0, before = 0;
                    for (size_t i = 0; i < candidates.size(); ++i) {
                      const double mass = std::exp(candidates[i].logit / kTemperature);
                      sum += mass;
                      if (i < rank) before += mass;
                    }
                    // Whatever is more probable does not make up top_p by itself.
                    EXPECT_LT(before, kTopP * sum * (1 + 1e-5));
                    nucleus_used = std::max(nucleus_used, rank);
                  });
  }
  EXPECT_EQ(top_k_used, kTopK - 1);
  EXPECT_GT(nucleus_used, 0u);
}

// The first draw over many seeds against the softmax at the temperature: chi-square of at most 4 degrees of
// freedom, which exceeds 28 once in 80,000 times. The seeds are fixed, so it does or does not.
TEST(Generate, DrawsFollowTheSoftmaxAtTheTemperature) {
  LoadedModel loaded = make_model();
  for (const double temperature : {0.7, 1.0, 3.0}) {
    const auto candidates = candidates_after(loaded, "GATTACA");
    ASSERT_EQ(candidates.size(), 5u);
    double sum = 0;
    std::vector<double> expected;
    for (const auto& candidate : candidates) expected.push_back(std::exp(candidate.logit / temperature));
    sum = std::accumulate(expected.begin(), expected.end(), 0.0);
    std::vector<int> counts(candidates.size());
    constexpr int kDraws = 2000;
    for (int seed = 0; seed < kDraws; ++seed) {
      const std::string text =
          text_of(loaded, options_of("GATTACA", 1, temperature, static_cast<uint64_t>(seed)));
      const int32_t id = text.empty() ? *loaded.vocabulary.special().eos
                                      : loaded.vocabulary.id(static_cast<uint8_t>(text[0]));
      for (size_t i = 0; i < candidates.size(); ++i) counts[i] += candidates[i].id == id ? 1 : 0;
    }
    EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), 0), kDraws);
    double chi_square = 0;
    for (size_t i = 0; i < candidates.size(); ++i) {
      const double mean = kDraws * expected[i] / sum;
      chi_square += (counts[i] - mean) * (counts[i] - mean) / mean;
    }
    EXPECT_LT(chi_square, 28.0) << "temperature " << temperature;
  }
}

TEST(Generate, SaysWhyItStopped) {
  LoadedModel loaded = make_model(16);
  never_end(loaded);
  Generated result = generate(loaded, options_of("ACGT", 0, 0));
  EXPECT_EQ(result.text, "");
  EXPECT_EQ(result.stop, GenerateStop::kMaxNewTokens);
  // BOS and ACGT fill 5 places of 16. The last place is read too: 12 tokens follow.
  result = generate(loaded, options_of("ACGT", 12, 0));
  EXPECT_EQ(result.stop, GenerateStop::kMaxNewTokens);
  const std::string twelve = result.text;
  result = generate(loaded, options_of("ACGT", 13, 0));
  EXPECT_EQ(result.stop, GenerateStop::kWindowFull);
  EXPECT_EQ(result.tokens, 12);
  EXPECT_EQ(result.text, twelve);
  result = generate(loaded, options_of("ACGTACGTACGTACG", 5, 0));  // the prompt fills the window
  EXPECT_EQ(result.stop, GenerateStop::kWindowFull);
  EXPECT_EQ(result.text.size(), 1u);
}

TEST(Generate, EndsAtEosAndKeepsItOutOfTheText) {
  LoadedModel loaded = make_model();
  // The final norm's output has no sign that is always the same, so of two opposite rows one is above 0.
  const TensorView head = loaded.model->weight(loaded.model->parameters().find("lm_head.weight"));
  bool ended = false;
  for (const float sign : {1.0f, -1.0f}) {
    for (int32_t id = 0; id < loaded.vocabulary.size(); ++id) set_logit_row(loaded, id, 0.0f);
    std::fill_n(head.f32() + *loaded.vocabulary.special().eos * head.row_stride, head.row_stride, sign);
    const Generated result = generate(loaded, options_of("ACGT", 20, 0));
    if (result.stop != GenerateStop::kEos) continue;
    ended = true;
    EXPECT_LT(result.tokens, 20);
    EXPECT_EQ(static_cast<int64_t>(result.text.size()), result.tokens);
    EXPECT_EQ(result.text.find_first_not_of("ACGT"), std::string::npos);
  }
  EXPECT_TRUE(ended);
}

// The message of the error of the user's making that generate() throws.
std::string refused(LoadedModel& loaded, const GenerateOptions& options) {
  try {
    generate(loaded, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return "";
}

TEST(Generate, RefusesAPromptThatTheVocabularyCannotExpress) {
  LoadedModel loaded = make_model();
  EXPECT_THAT(refused(loaded, options_of("ACJT", 4, 1)),
              AllOf(HasSubstr("'J'"), HasSubstr("the vocabulary dna")));
  EXPECT_THAT(refused(loaded, options_of("AC GT", 4, 1)), HasSubstr("the prompt holds"));
  EXPECT_THAT(refused(loaded, options_of("AC\xc3\xa9", 4, 1)), HasSubstr("0xc3"));
  EXPECT_NO_THROW(generate(loaded, options_of("acgtuRYN", 4, 1)));
  LoadedModel bytes = make_model(48, Vocabulary::nucleotide());
  EXPECT_THAT(refused(bytes, options_of(std::string("AC\x01"), 4, 1)), HasSubstr("0x01"));  // PAD
}

TEST(Generate, RefusesAnEmptyPromptWhereNothingStandsBeforeIt) {
  LoadedModel loaded = make_model();
  EXPECT_NO_THROW(generate(loaded, options_of("", 4, 1)));  // BOS
  loaded.data.add_bos = false;
  EXPECT_THAT(refused(loaded, options_of("", 4, 1)), HasSubstr("the prompt is empty"));
  EXPECT_NO_THROW(generate(loaded, options_of("A", 4, 1)));
}

TEST(Generate, RefusesAPromptLongerThanTheWindow) {
  LoadedModel loaded = make_model(16);
  EXPECT_NO_THROW(generate(loaded, options_of(std::string(15, 'A'), 1, 1)));
  EXPECT_THAT(refused(loaded, options_of(std::string(16, 'A'), 1, 1)),
              AllOf(HasSubstr("17 tokens"), HasSubstr("window of 16")));
}

TEST(Generate, RefusesOptionsOutOfRange) {
  LoadedModel loaded = make_model();
  const auto with = [](auto change) {
    GenerateOptions options = options_of("A", 1, 1);
    change(options);
    return options;
  };
  EXPECT_THAT(refused(loaded, with([](auto& o) { o.max_new_tokens = -1; })), HasSubstr("max-new-tokens"));
  EXPECT_THAT(refused(loaded, with([](auto& o) { o.temperature = -0.1; })), HasSubstr("temperature"));
  EXPECT_THAT(refused(loaded, with([](auto& o) { o.temperature = NAN; })), HasSubstr("temperature"));
  EXPECT_THAT(refused(loaded, with([](auto& o) { o.top_k = -1; })), HasSubstr("top-k"));
  EXPECT_THAT(refused(loaded, with([](auto& o) { o.top_p = 0; })), HasSubstr("top-p"));
  EXPECT_THAT(refused(loaded, with([](auto& o) { o.top_p = 1.1; })), HasSubstr("top-p"));
}

TEST(Generate, StopsAtLogitsThatAreNotFinite) {
  LoadedModel loaded = make_model();
  set_logit_row(loaded, loaded.vocabulary.id('A'), NAN);
  try {
    generate(loaded, options_of("ACGT", 4, 1));
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFailure);
  }
}

}  // namespace
}  // namespace biomoe
