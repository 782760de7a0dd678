#include "biomoe/checkpoint/hf_config.h"

#include <array>
#include <cmath>
#include <utility>

#include "biomoe/checkpoint/json_text.h"
#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "biomoe/core/version.h"

namespace biomoe {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxConfigBytes = uint64_t{4} << 20;
constexpr double kMaxExperts = 1 << 20;  // over all layers
constexpr double kMaxElements = 0x1p46;
constexpr double kDefaultRopeTheta = 1e6;  // of transformers' Mixtral

constexpr std::array<std::pair<std::string_view, DType>, 4> kDTypeNames{{{"float32", DType::kF32},
                                                                         {"bfloat16", DType::kBF16},
                                                                         {"float16", DType::kF16},
                                                                         {"float64", DType::kF64}}};

// Anything but null, false, 0, "", [] and {} under these keys is a model that this program does not compute.
constexpr std::array kRefusedKeys{"attention_bias",
                                  "qkv_bias",
                                  "mlp_bias",
                                  "use_bias",
                                  "add_bias",
                                  "quantization_config",
                                  "is_encoder_decoder",
                                  "pruned_heads",
                                  "num_shared_experts",
                                  "n_shared_experts",
                                  "use_qk_norm",
                                  "qk_layernorm",
                                  "clip_qkv",
                                  "attention_sink",
                                  "add_cross_attention",
                                  "logits_soft_cap",
                                  "final_logit_softcapping",
                                  "attn_logit_softcapping"};
// These act in training only, and are not applied here.
constexpr std::array kIgnoredInTraining{"attention_dropout", "router_jitter_noise", "hidden_dropout"};

// Transformers' defaults for the fields of ModelConfig, where they differ from ours.
ModelConfig transformers_defaults() {
  ModelConfig model;
  model.vocab_size = 32000;
  model.hidden_size = 4096;
  model.intermediate_size = 14336;
  model.num_hidden_layers = 32;
  model.num_attention_heads = 32;
  model.num_key_value_heads = 8;
  model.max_position_embeddings = 131072;
  model.num_local_experts = 8;
  model.num_experts_per_tok = 2;
  model.rms_norm_eps = 1e-5;
  model.rope_theta = kDefaultRopeTheta;
  model.router_aux_loss_coef = 0.001;
  model.router_z_loss_coef = 0.0;
  model.initializer_range = 0.02;
  return model;
}

std::string brief(const json& value) {
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() > 80 ? text.substr(0, 77) + "..." : text;
}

bool is_off(const json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) ||
         (value.is_number() && value.get<double>() == 0.0) ||
         (value.is_string() && value.get<std::string>().empty()) || (value.is_structured() && value.empty());
}

class ConfigReader {
 public:
  ConfigReader(const json& object, const std::string& origin) : object_(object), origin_(origin) {}

  HfConfig read() {
    check_kind();
    refuse_other_models();
    config_.model = transformers_defaults();
    config_.model.visit(*this);
    config_.model.rope_theta = read_rope_theta();
    read_tokens();
    read_dtype();
    if (const json* dataset = find(kHfDatasetKey); dataset && !dataset->is_null()) {
      if (!dataset->is_object()) throw error(kHfDatasetKey, *dataset, "an object");
      config_.dataset = *dataset;
    }
    try {
      config_.model.validate();
    } catch (const Error& error) {
      throw user_error("{}: {}", origin_, error.what());
    }
    check_size();
    return std::move(config_);
  }

  // ModelConfig::visit calls one of these for each field.
  void field(const char* key, int64_t& member, const char*) {
    const json* value = find(key);
    if (value && value->is_null() && std::string_view(key) == "num_key_value_heads") {
      member = config_.model.num_attention_heads;  // visited before; as transformers reads null
    } else if (value) {
      member = integer(key, *value);
    } else if (const json* alias =
                   std::string_view(key) == "num_local_experts" ? find("num_experts") : nullptr) {
      member = integer("num_experts", *alias);
    } else {
      defaulted(key, fmt::to_string(member));
    }
  }
  void field(const char* key, std::optional<int64_t>& member, const char*) {
    const json* value = find(key);
    if (!value) return defaulted(key, "null");
    if (!value->is_null()) member = integer(key, *value);
  }
  void field(const char* key, double& member, const char*) {
    if (std::string_view(key) == "rope_theta") return;  // has two places; see read_rope_theta
    const json* value = find(key);
    if (value) {
      member = real(key, *value);
    } else if (std::string_view(key) != "router_z_loss_coef") {  // not a key of transformers
      defaulted(key, fmt::to_string(member));
    }
  }
  void field(const char* key, bool& member, const char*) {
    const json* value = find(key);
    if (!value) return defaulted(key, member ? "true" : "false");
    if (!value->is_boolean()) throw error(key, *value, "true or false");
    member = value->get<bool>();
  }
  // layer_precision and router_aux_loss_type are of training, and no keys of transformers.
  void field(const char*, std::vector<std::string>&, const char*) {}
  template <typename Enum, typename Names>
  void choice(const char*, Enum&, const Names&, const char*) {}

 private:
  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  Error error(const std::string& key, const json& value, const char* wanted) const {
    return user_error("{}: {} is {}; {} was expected", origin_, key, brief(value), wanted);
  }

  int64_t integer(const std::string& key, const json& value) const {
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() >> 62)) {
      throw error(key, value, "an integer");
    }
    return value.get<int64_t>();
  }

  double real(const std::string& key, const json& value) const {
    if (!value.is_number()) throw error(key, value, "a number");
    return value.get<double>();
  }

  void note(std::string text) { config_.notes.push_back(fmt::format("{}: {}", origin_, text)); }
  void defaulted(const char* key, const std::string& value) {
    note(fmt::format("{} is not given; the default of transformers' Mixtral is taken: {}", key, value));
  }

  void check_kind() {
    if (const json* type = find("model_type"); !type || *type != "mixtral") {
      throw user_error("{}: model_type is {}; only \"mixtral\" is read", origin_,
                       type ? brief(*type) : "not given");
    }
    const json* names = find("architectures");
    if (!names || names->is_null()) return note("architectures is not given; MixtralForCausalLM is taken");
    if (!names->is_array() || names->size() != 1 ||
        (names->front() != "MixtralForCausalLM" && names->front() != "MixtralModel")) {
      throw error("architectures", *names, "[\"MixtralForCausalLM\"]");
    }
  }

  void refuse_other_models() {
    for (const char* key : kRefusedKeys) {
      const json* value = find(key);
      if (value && !is_off(*value)) {
        throw user_error("{}: {}={} makes a model that is not computed here", origin_, key, brief(*value));
      }
    }
    for (const char* key : kIgnoredInTraining) {
      const json* value = find(key);
      if (value && !is_off(*value)) note(fmt::format("{}={} is not applied", key, brief(*value)));
    }
    if (const json* activation = find("hidden_act"); !activation) {
      defaulted("hidden_act", "silu");
    } else if (*activation != "silu") {
      throw error("hidden_act", *activation, "\"silu\"");
    }
    if (const json* factor = find("partial_rotary_factor"))
      check_rotary_factor("partial_rotary_factor", *factor);
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      if (const json* rope = find(key); rope && !rope->is_null()) check_rope_object(key, *rope);
    }
  }

  // Each size may be in range and their product still be no model that any machine holds.
  void check_size() const {
    const ModelConfig& m = config_.model;
    const auto real_of = [](int64_t value) { return static_cast<double>(value); };
    const double experts = real_of(m.num_hidden_layers) * real_of(m.num_local_experts);
    const double width = real_of(m.hidden_size);
    const double attention =
        2 * real_of(m.num_attention_heads + m.num_key_value_heads) * real_of(m.key_width());
    const double elements = width * (3 * experts * real_of(m.intermediate_size) +
                                     real_of(m.num_hidden_layers) * attention + 2 * real_of(m.vocab_size));
    if (experts > kMaxExperts || elements > kMaxElements) {
      throw user_error("{}: {} experts and {:.3g} parameters are beyond what a checkpoint can hold", origin_,
                       experts, elements);
    }
  }

  void check_rotary_factor(const std::string& key, const json& factor) const {
    if (!factor.is_null() && real(key, factor) != 1.0) throw error(key, factor, "1.0");
  }

  // rope_parameters (transformers 5) and rope_scaling (4): type, base and what a scaling needs.
  void check_rope_object(const std::string& name, const json& rope) const {
    if (!rope.is_object()) throw error(name, rope, "an object");
    for (const auto& [key, value] : rope.items()) {
      const std::string path = name + "." + key;
      if (key == "rope_type" || key == "type") {
        if (value != "default")
          throw error(path, value, "\"default\" (scaled rotary embeddings are not computed here)");
      } else if (key == "partial_rotary_factor") {
        check_rotary_factor(path, value);
      } else if (key != "rope_theta" && !value.is_null()) {
        throw user_error("{}: {}={} makes a model that is not computed here", origin_, quote(path),
                         brief(value));
      }
    }
  }

  double read_rope_theta() {
    std::optional<double> theta;
    std::string source;
    const auto offer = [&](const std::string& path, const json* value) {
      if (!value || value->is_null()) return;
      const double given = real(path, *value);
      if (theta && *theta != given) {
        throw user_error("{}: {}={} and {}={} are in conflict; make them agree or remove one", origin_,
                         source, *theta, path, given);
      }
      theta = given;
      source = path;
    };
    offer("rope_theta", find("rope_theta"));
    for (const char* name : {"rope_parameters", "rope_scaling"}) {
      const json* rope = find(name);
      if (!rope || !rope->is_object()) continue;
      const auto inner = rope->find("rope_theta");
      if (inner != rope->end()) offer(std::string(name) + ".rope_theta", &*inner);
    }
    if (!theta) {
      note(fmt::format("neither rope_theta nor rope_parameters.rope_theta is given; {} is taken",
                       kDefaultRopeTheta));
    }
    return theta.value_or(kDefaultRopeTheta);
  }

  int64_t token(const char* key, const json& value) const {
    const int64_t id = integer(key, value);
    // -1 stands for none.
    if (id < -1 || id >= config_.model.vocab_size)
      throw error(key, value,
                  fmt::format("a token id below vocab_size={}", config_.model.vocab_size).c_str());
    return id;
  }

  void read_tokens() {
    const auto one = [&](const char* key) -> std::optional<int64_t> {
      const json* value = find(key);
      if (!value || value->is_null()) return std::nullopt;
      return token(key, *value);
    };
    config_.tokens.bos = one("bos_token_id");
    config_.tokens.pad = one("pad_token_id");
    const json* eos = find("eos_token_id");
    if (!eos || eos->is_null()) return;
    if (!eos->is_array()) {
      config_.tokens.eos = {token("eos_token_id", *eos)};
      return;
    }
    for (const auto& id : *eos) config_.tokens.eos.push_back(token("eos_token_id", id));
  }

  void read_dtype() {
    std::optional<std::string> first;
    for (const char* key : {"dtype", "torch_dtype"}) {
      const json* value = find(key);
      if (!value || value->is_null()) continue;
      if (!value->is_string()) throw error(key, *value, "the name of a type");
      const std::string name = value->get<std::string>();
      if (first) {
        if (*first != name)
          note(fmt::format("torch_dtype={} differs from dtype={}", quote(name), quote(*first)));
        continue;
      }
      first = name;
      for (const auto& [known, dtype] : kDTypeNames) {
        if (known == name) config_.dtype = dtype;
      }
      if (!config_.dtype)
        note(fmt::format("{}={} is not known here; the tensors' own types are read", key, quote(name)));
    }
  }

  const json& object_;
  const std::string& origin_;
  HfConfig config_;
};

// The fields of ModelConfig into a JSON object; an absent optional is null.
struct FieldWriter {
  json& object;
  template <typename T>
  void field(const char* key, const T& value, const char*) {
    object[key] = value;
  }
  void field(const char* key, const std::optional<int64_t>& value, const char*) {
    object[key] = value ? json(*value) : json(nullptr);
  }
  // What is of training is left out, as in reading.
  void field(const char*, const std::vector<std::string>&, const char*) {}
  template <typename Enum, typename Names>
  void choice(const char*, const Enum&, const Names&, const char*) {}
};

json token_json(const std::optional<int64_t>& id) {
  return id ? json(*id) : json(nullptr);
}

json eos_json(const std::vector<int64_t>& ids) {
  if (ids.empty()) return nullptr;
  return ids.size() == 1 ? json(ids.front()) : json(ids);
}

}  // namespace

HfConfig parse_hf_config(std::string_view text, const std::string& origin) {
  const json object =
      parse_json(text, origin, {.max_bytes = kMaxConfigBytes, .max_depth = 16, .max_values = 100'000});
  if (!object.is_object()) throw user_error("{}: not a JSON object", origin);
  return ConfigReader(object, origin).read();
}

HfConfig read_hf_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  open_regular_file(path);
  return parse_hf_config(read_file(path, kMaxConfigBytes), path.string());
}

json hf_config_json(const ModelConfig& model, const HfTokenIds& tokens, DType dtype) {
  json object = json::object();
  FieldWriter writer{object};
  ModelConfig copy = model;  // visit() is for reading and writing
  copy.visit(writer);
  if (model.router_z_loss_coef == 0.0) object.erase("router_z_loss_coef");  // not a key of transformers
  object["architectures"] = json::array({"MixtralForCausalLM"});
  object["model_type"] = "mixtral";
  object["hidden_act"] = "silu";
  object["attention_dropout"] = 0.0;
  object["router_jitter_noise"] = 0.0;
  object["output_router_logits"] = false;
  object["use_cache"] = true;
  object["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", model.rope_theta}};
  object["bos_token_id"] = token_json(tokens.bos);
  object["eos_token_id"] = eos_json(tokens.eos);
  object["pad_token_id"] = token_json(tokens.pad);
  for (const auto& [name, known] : kDTypeNames) {
    if (known == dtype) object["dtype"] = object["torch_dtype"] = name;
  }
  object["biomoe_version"] = kVersion;
  return object;
}

json hf_generation_config_json(const HfTokenIds& tokens) {
  json object = {{"_from_model_config", true}};
  if (tokens.bos) object["bos_token_id"] = *tokens.bos;
  if (!tokens.eos.empty()) object["eos_token_id"] = eos_json(tokens.eos);
  if (tokens.pad) object["pad_token_id"] = *tokens.pad;
  return object;
}

}  // namespace biomoe
