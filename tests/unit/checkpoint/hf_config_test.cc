#include "biomoe/checkpoint/hf_config.h"

#include <algorithm>

#include "checkpoint_test_util.h"

namespace biomoe {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::expect_error;
using testing::small_model;

json small_config() {
  return hf_config_json(small_model(), {1, {2}, std::nullopt}, DType::kF32);
}

HfConfig parse(const json& config) {
  return parse_hf_config(config.dump(), "config.json");
}

bool has_note(const HfConfig& config, const std::string& what) {
  return std::any_of(config.notes.begin(), config.notes.end(),
                     [&](const std::string& note) { return note.find(what) != std::string::npos; });
}

// Every field of two configurations, so that a new one cannot be forgotten.
struct FieldList {
  std::vector<std::string> values;
  template <typename T>
  void field(const char* key, T& value, const char*) {
    values.push_back(fmt::format("{}={}", key, value));
  }
  void field(const char* key, std::optional<int64_t>& value, const char*) {
    values.push_back(fmt::format("{}={}", key, value ? std::to_string(*value) : "null"));
  }
  void field(const char* key, std::vector<std::string>& value, const char*) {
    values.push_back(fmt::format("{} of {}", key, value.size()));
  }
  template <typename Enum, typename Names>
  void choice(const char* key, Enum& value, const Names& names, const char*) {
    values.push_back(fmt::format("{}={}", key, names[static_cast<size_t>(value)]));
  }
};
std::vector<std::string> fields(ModelConfig config) {
  FieldList list;
  config.visit(list);
  return list.values;
}

TEST(HfConfig, HasNoKeysOfTrainingAlone) {
  ModelConfig model = small_model();
  model.layer_precision.assign(static_cast<size_t>(model.num_hidden_layers), "fp8");
  model.router_aux_loss_type = AuxLossType::kPerLayer;
  const json written =
      hf_config_json(model, {.bos = std::nullopt, .eos = {}, .pad = std::nullopt}, DType::kF32);
  for (const char* key : {"layer_precision", "router_aux_loss_type"})
    EXPECT_FALSE(written.contains(key)) << key;
}

TEST(HfConfig, GoesThroughJson) {
  ModelConfig model = small_model();
  EXPECT_EQ(fields(parse(small_config()).model), fields(model));
  EXPECT_TRUE(parse(small_config()).notes.empty()) << parse(small_config()).notes.front();
  model.head_dim = 6;
  model.sliding_window = 5;
  model.tie_word_embeddings = true;
  model.rope_theta = 12345.678;
  model.rms_norm_eps = 1e-6;
  model.router_aux_loss_coef = 0.3;
  model.router_z_loss_coef = 0.001;
  model.initializer_range = 0.1;
  model.max_position_embeddings = 77;
  const HfConfig read = parse(hf_config_json(model, {std::nullopt, {4, 5}, 0}, DType::kBF16));
  EXPECT_EQ(fields(read.model), fields(model));
  EXPECT_EQ(read.tokens, (HfTokenIds{std::nullopt, {4, 5}, 0}));
  EXPECT_EQ(read.dtype, DType::kBF16);
}

TEST(HfConfig, WritesTheKeysOfBothVersions) {
  const json config = small_config();
  EXPECT_EQ(config["architectures"], json::parse(R"(["MixtralForCausalLM"])"));
  EXPECT_EQ(config["model_type"], "mixtral");
  EXPECT_EQ(config["rope_theta"], 1e6);
  EXPECT_EQ(config["rope_parameters"]["rope_theta"], 1e6);
  EXPECT_EQ(config["rope_parameters"]["rope_type"], "default");
  EXPECT_EQ(config["dtype"], "float32");
  EXPECT_EQ(config["torch_dtype"], "float32");
  EXPECT_EQ(config["eos_token_id"], 2);
  EXPECT_TRUE(config["pad_token_id"].is_null());
  EXPECT_TRUE(config["head_dim"].is_null());
  EXPECT_FALSE(config.contains("router_z_loss_coef"));
  EXPECT_EQ(hf_generation_config_json({1, {2, 3}, 0})["eos_token_id"], json::parse("[2, 3]"));
  EXPECT_FALSE(hf_generation_config_json({}).contains("bos_token_id"));
}

TEST(HfConfig, ReadsTheGoldens) {
  const std::filesystem::path goldens = std::filesystem::path(BIOMOE_TEST_DATA) / "goldens/hf";
  const HfConfig base = read_hf_config(goldens / "base");
  EXPECT_EQ(base.model.hidden_size, 64);
  EXPECT_EQ(base.model.rope_theta, 1e6);
  EXPECT_EQ(base.tokens, (HfTokenIds{1, {2}, std::nullopt}));
  EXPECT_TRUE(base.notes.empty()) << base.notes.front();
  const HfConfig window = read_hf_config(goldens / "top1_tied_window");
  EXPECT_EQ(window.model.sliding_window, 8);
  EXPECT_TRUE(window.model.tie_word_embeddings);
  EXPECT_EQ(read_hf_config(goldens / "sharded_bf16").dtype, DType::kBF16);
}

TEST(HfConfig, RopeThetaHasTwoPlaces) {
  json config = small_config();
  config["rope_theta"] = 5000.0;
  config["rope_parameters"]["rope_theta"] = 5000;  // an integer of the same value agrees
  EXPECT_EQ(parse(config).model.rope_theta, 5000.0);
  config["rope_parameters"]["rope_theta"] = 5001;
  expect_error([&] { parse(config); }, "rope_theta=5000 and rope_parameters.rope_theta=5001 are in conflict");
  config.erase("rope_parameters");
  EXPECT_EQ(parse(config).model.rope_theta, 5000.0);
  config["rope_parameters"] = {{"rope_type", "default"}};
  EXPECT_EQ(parse(config).model.rope_theta, 5000.0);
  config.erase("rope_theta");
  config["rope_parameters"]["rope_theta"] = 123.0;
  const HfConfig only_new = parse(config);
  EXPECT_EQ(only_new.model.rope_theta, 123.0);
  EXPECT_TRUE(only_new.notes.empty());
  for (const json& none : {json(nullptr), json({{"rope_type", "default"}})}) {
    config["rope_parameters"] = none;
    const HfConfig neither = parse(config);
    EXPECT_EQ(neither.model.rope_theta, 1e6);
    EXPECT_TRUE(has_note(neither, "neither rope_theta nor rope_parameters.rope_theta")) << none;
  }
  config.erase("rope_parameters");
  EXPECT_TRUE(has_note(parse(config), "neither rope_theta"));
  config["rope_theta"] = nullptr;
  EXPECT_TRUE(has_note(parse(config), "neither rope_theta"));
}

TEST(HfConfig, AbsentKeysTakeTheDefaultsOfTransformersAndSaySo) {
  const HfConfig read = parse({{"model_type", "mixtral"}});
  EXPECT_EQ(read.model.vocab_size, 32000);
  EXPECT_EQ(read.model.hidden_size, 4096);
  EXPECT_EQ(read.model.intermediate_size, 14336);
  EXPECT_EQ(read.model.num_hidden_layers, 32);
  EXPECT_EQ(read.model.num_attention_heads, 32);
  EXPECT_EQ(read.model.num_key_value_heads, 8);
  EXPECT_EQ(read.model.num_local_experts, 8);
  EXPECT_EQ(read.model.num_experts_per_tok, 2);
  EXPECT_EQ(read.model.max_position_embeddings, 131072);
  EXPECT_EQ(read.model.router_aux_loss_coef, 0.001);
  EXPECT_EQ(read.model.key_width(), 128);
  EXPECT_FALSE(read.model.tie_word_embeddings);
  const json full = small_config();
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "num_local_experts", "num_experts_per_tok", "max_position_embeddings",
        "rms_norm_eps", "tie_word_embeddings", "sliding_window", "hidden_act", "architectures"}) {
    EXPECT_TRUE(has_note(read, std::string(key) + " is not given")) << key;
    EXPECT_TRUE(full.contains(key)) << key;
  }
}

TEST(HfConfig, NullIsReadAsTransformersReadsIt) {
  json config = small_config();
  config["num_key_value_heads"] = nullptr;
  EXPECT_EQ(parse(config).model.num_key_value_heads, 2);
  config["sliding_window"] = 4096;
  config["head_dim"] = 16;
  EXPECT_EQ(parse(config).model.sliding_window, 4096);
  EXPECT_EQ(parse(config).model.key_width(), 16);
  config["hidden_size"] = nullptr;
  expect_error([&] { parse(config); }, "hidden_size is null; an integer was expected");
}

TEST(HfConfig, RefusesOtherModels) {
  const std::vector<std::tuple<std::string, json, std::string>> cases = {
      {"model_type", "llama", "model_type is \"llama\""},
      {"model_type", nullptr, "model_type is null"},
      {"architectures", {"LlamaForCausalLM"}, "architectures is [\"LlamaForCausalLM\"]"},
      {"architectures", "MixtralForCausalLM", "architectures is"},
      {"architectures", json::parse(R"(["MixtralForCausalLM", "X"])"), "architectures is"},
      {"hidden_act", "gelu", "hidden_act is \"gelu\"; \"silu\" was expected"},
      {"hidden_act", nullptr, "hidden_act is null"},
      {"attention_bias", true, "attention_bias=true makes a model"},
      {"mlp_bias", true, "mlp_bias=true"},
      {"quantization_config", {{"quant_method", "gptq"}}, "quantization_config="},
      {"partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5"},
      {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "rope_scaling"},
      {"rope_scaling", {{"rope_type", "yarn"}}, "rope_scaling.rope_type is \"yarn\"; \"default\""},
      {"rope_parameters",
       {{"rope_type", "llama3"}, {"rope_theta", 1e6}},
       "rope_parameters.rope_type is \"llama3\""},
      {"rope_parameters", {{"rope_type", "default"}, {"factor", 2.0}}, "rope_parameters.factor"},
      {"rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}, "rope_parameters.full_attention"},
      {"rope_parameters", 5, "rope_parameters is 5; an object"}};
  for (const auto& [key, value, what] : cases) {
    json config = small_config();
    config[key] = value;
    const std::string message = error_of([&] { parse(config); });
    EXPECT_NE(message.find(what), std::string::npos) << key << "=" << value << " -> " << message;
    EXPECT_EQ(message.find("config.json: "), 0u) << message;
  }
}

TEST(HfConfig, HarmlessKeysAreAccepted) {
  json config = small_config();
  config["attention_bias"] = false;
  config["rope_scaling"] = nullptr;
  config["partial_rotary_factor"] = 1.0;
  config["quantization_config"] = nullptr;
  config["transformers_version"] = "4.36.0.dev0";
  config["some_new_key"] = {{"a", 1}};
  EXPECT_TRUE(parse(config).notes.empty());
  config["attention_dropout"] = 0.1;
  EXPECT_TRUE(has_note(parse(config), "attention_dropout=0.1 is not applied"));
  config["rope_scaling"] = {{"type", "default"}};
  EXPECT_EQ(error_of([&] { parse(config); }), "");
}

TEST(HfConfig, RefusesWrongTypesAndAbsurdSizes) {
  const std::vector<std::tuple<std::string, json, std::string>> cases = {
      {"hidden_size", "8", "hidden_size is \"8\"; an integer"},
      {"hidden_size", 8.0, "an integer"},
      {"hidden_size", true, "an integer"},
      {"hidden_size", json::array(), "an integer"},
      {"hidden_size", 18446744073709551615ull, "an integer"},
      {"hidden_size", 4611686018427387903ll, "hidden_size=4611686018427387903 is outside"},
      {"hidden_size", 0, "hidden_size=0"},
      {"hidden_size", -8, "hidden_size=-8"},
      {"num_hidden_layers", 1'000'000, "num_hidden_layers=1000000"},
      {"num_attention_heads", 3, "hidden_size=8 does not divide"},
      {"num_experts_per_tok", 4, "num_experts_per_tok=4 is more than"},
      {"head_dim", 3, "is odd"},
      {"head_dim", "auto", "head_dim is \"auto\""},
      {"sliding_window", 0, "sliding_window=0"},
      {"sliding_window", false, "sliding_window is false"},
      {"rms_norm_eps", "1e-5", "rms_norm_eps is \"1e-5\"; a number"},
      {"rms_norm_eps", 0, "rms_norm_eps=0"},
      {"rope_theta", "1e6", "rope_theta is \"1e6\""},
      {"rope_theta", -1.0, "conflict"},
      {"tie_word_embeddings", 1, "tie_word_embeddings is 1; true or false"},
      {"bos_token_id", "<s>", "bos_token_id"},
      {"bos_token_id", 99999, "bos_token_id is 99999; a token id below vocab_size="},
      {"rms_norm_eps", 1e300, "above 1"},
      {"eos_token_id", json::parse("[1, null]"), "eos_token_id is null"},
      {"eos_token_id", 1.5, "eos_token_id is 1.5"},
      {"torch_dtype", 16, "torch_dtype is 16"}};
  for (const auto& [key, value, what] : cases) {
    json config = small_config();
    config[key] = value;
    const std::string message = error_of([&] { parse(config); });
    EXPECT_NE(message.find(what), std::string::npos) << key << "=" << value << " -> " << message;
  }
  json config = small_config();
  config["num_hidden_layers"] = 4096;
  config["num_local_experts"] = 4096;
  expect_error([&] { parse(config); }, "beyond what a checkpoint can hold");
  config["num_local_experts"] = 4;
  config["hidden_size"] = 1 << 20;
  config["intermediate_size"] = 1 << 20;
  config["head_dim"] = 8;
  expect_error([&] { parse(config); }, "beyond what a checkpoint can hold");
}

TEST(HfConfig, RefusesWhatIsNoConfiguration) {
  for (const char* text :
       {"", "[]", "{", "null", "{\"model_type\": \"mixtral\", \"model_type\": \"mixtral\"}",
        "{\"model_type\": \"mixtral\", \"hidden_size\": 1e999}", "\xff\xfe"}) {
    EXPECT_NE(error_of([&] { parse_hf_config(text, "config.json"); }), "") << text;
  }
  expect_error([&] { parse_hf_config(std::string(100'000, '['), "config.json"); }, "nested deeper");
  expect_error([&] { parse_hf_config(std::string(5 << 20, ' '), "config.json"); }, "bytes of JSON");
  const testing::TempFolder folder;
  expect_error([&] { read_hf_config(folder.path()); }, "config.json: cannot open");
}

TEST(HfConfig, DeclaredTypesAreOnlyDeclared) {
  json config = small_config();
  config["torch_dtype"] = "bfloat16";
  EXPECT_TRUE(has_note(parse(config), "torch_dtype='bfloat16' differs from dtype='float32'"));
  config.erase("dtype");
  EXPECT_EQ(parse(config).dtype, DType::kBF16);
  config["torch_dtype"] = "float8";
  EXPECT_FALSE(parse(config).dtype);
  EXPECT_TRUE(has_note(parse(config), "'float8' is not known"));
}

}  // namespace
}  // namespace biomoe
