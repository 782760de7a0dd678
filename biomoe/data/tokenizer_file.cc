#include "biomoe/data/tokenizer_file.h"

#include <algorithm>
#include <string_view>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "biomoe/data/alphabet.h"

namespace biomoe::internal {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxFileBytes = uint64_t{64} << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 20;

json read_json(const std::filesystem::path& path) {
  json value = json::parse(read_file(path, kMaxFileBytes), nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded() || !value.is_object()) throw user_error("{}: not a JSON object", path.string());
  return value;
}

const json& member(const json& object, const char* key) {
  static const json kNull;
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() ? *found : kNull;
}

std::string string_member(const json& object, const char* key) {
  const json& value = member(object, key);
  return value.is_string() ? value.get<std::string>() : std::string();
}

// Characters of well-formed UTF-8 (json guarantees that): bytes that are no continuation.
int64_t character_count(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<uint8_t>(c) & 0xc0) != 0x80; });
}

class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : path_(path), root_(read_json(path)) {}

  TokenizerFile read() {
    check_model();
    for (const json& token : member(root_, "added_tokens")) add_added_token(token);
    for (const auto& [text, id] : member(member(root_, "model"), "vocab").items()) add_vocab_token(text, id);
    if (file_.texts.empty()) throw error("has no tokens");
    map_symbols();
    find_special_tokens();
    return std::move(file_);
  }

 private:
  template <typename... Args>
  [[nodiscard]] Error error(fmt::format_string<Args...> format, Args&&... args) const {
    return user_error("{}: {}", path_.string(), fmt::format(format, std::forward<Args>(args)...));
  }

  void check_model() const {
    const json& model = member(root_, "model");
    const std::string type = string_member(model, "type");
    if (type != "WordLevel" && type != "BPE")
      throw error(
          "a tokenizer of type '{}'; only WordLevel, or BPE without merges, maps one symbol to one token",
          type);
    const json& merges = member(model, "merges");
    if (!merges.is_null() && !(merges.is_array() && merges.empty()))
      throw error("has BPE merges; only a tokenizer of single characters can be used");
    if (!member(model, "vocab").is_object()) throw error("model.vocab is not an object of token: id");
    const json& added = member(root_, "added_tokens");
    if (!added.is_null() && !added.is_array()) throw error("added_tokens is not a list");
  }

  void add_token(const std::string& text, const json& id, bool special) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= kMaxTokens)
      throw error("the id of token '{}' is not an integer in [0, {})", text, kMaxTokens);
    const auto index = id.get<size_t>();
    if (index >= file_.texts.size()) {
      file_.texts.resize(index + 1);
      file_.is_special.resize(index + 1, false);
    }
    std::string& slot = file_.texts[index];
    if (!slot.empty() && slot != text) throw error("tokens '{}' and '{}' share the id {}", slot, text, index);
    slot = text;
    if (special) file_.is_special[index] = true;
  }

  void add_added_token(const json& token) {
    const std::string text = string_member(token, "content");
    if (text.empty()) throw error("an entry of added_tokens has no content");
    add_token(text, member(token, "id"), /*special=*/true);
  }

  void add_vocab_token(const std::string& text, const json& id) {
    add_token(text, id, /*special=*/false);
    if (character_count(text) != 1 && !file_.is_special[id.get<size_t>()])
      throw error("the token '{}' is not one character; only a tokenizer of single characters can be used",
                  text);
  }

  // What the normaliser makes of one symbol. Throws for a normaliser that does more than map symbols.
  uint8_t normalise(const json& normaliser, uint8_t symbol) const {
    if (normaliser.is_null()) return symbol;
    const std::string type = string_member(normaliser, "type");
    if (type == "Sequence") {
      for (const json& step : member(normaliser, "normalizers")) symbol = normalise(step, symbol);
      return symbol;
    }
    if (type == "Lowercase") return is_letter(symbol) ? symbol | 0x20 : symbol;
    if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD")
      return symbol;  // ASCII is unchanged
    const std::string from = string_member(member(normaliser, "pattern"), "String");
    const std::string to = string_member(normaliser, "content");
    if (type != "Replace" || from.size() != 1 || to.size() != 1)
      throw error("the normalizer '{}' does more than replace single symbols", type);
    return symbol == static_cast<uint8_t>(from[0]) ? static_cast<uint8_t>(to[0]) : symbol;
  }

  void map_symbols() {
    std::array<int32_t, 256> exact{};
    exact.fill(-1);
    for (size_t id = 0; id < file_.texts.size(); ++id)
      if (file_.texts[id].size() == 1 && !file_.is_special[id])
        exact[static_cast<uint8_t>(file_.texts[id][0])] = static_cast<int32_t>(id);
    file_.ids.fill(-1);
    for (size_t c = 0x21; c < 0x7f; ++c)
      file_.ids[c] = exact[normalise(member(root_, "normalizer"), static_cast<uint8_t>(c))];
  }

  std::optional<int32_t> id_of(const std::string& text) const {
    const auto found = std::find(file_.texts.begin(), file_.texts.end(), text);
    if (text.empty() || found == file_.texts.end()) return std::nullopt;
    return static_cast<int32_t>(found - file_.texts.begin());
  }

  // `key` as a file beside the tokenizer gives it, else the first of `usual` that is a token.
  std::optional<int32_t> special_id(const char* key, std::initializer_list<const char*> usual) const {
    for (const char* beside : {"tokenizer_config.json", "special_tokens_map.json"}) {
      const std::filesystem::path config = path_.parent_path() / beside;
      if (!std::filesystem::exists(config)) continue;
      const json value = read_json(config);
      const json& token = member(value, key);
      const std::string text =
          token.is_object() ? string_member(token, "content") : string_member(value, key);
      if (text.empty()) continue;
      if (const auto id = id_of(text)) return id;
      throw user_error("{}: {} '{}' is not a token of {}", config.string(), key, text, path_.string());
    }
    for (const char* text : usual)
      if (const auto id = id_of(text)) return id;
    return std::nullopt;
  }

  void find_special_tokens() {
    SpecialTokens& special = file_.special;
    special.bos = special_id("bos_token", {"<BOS>", "<bos>", "[BOS]", "<s>", "<cls>", "[CLS]"});
    special.eos = special_id("eos_token", {"<EOS>", "<eos>", "[EOS]", "</s>", "[SEP]"});
    special.pad = special_id("pad_token", {"<PAD>", "<pad>", "[PAD]"});
    special.unk = id_of(string_member(member(root_, "model"), "unk_token"));
    if (!special.unk) special.unk = special_id("unk_token", {"<UNK>", "<unk>", "[UNK]"});
    for (const auto& id : {special.bos, special.eos, special.pad, special.unk})
      if (id) file_.is_special[static_cast<size_t>(*id)] = true;
  }

  std::filesystem::path path_;
  json root_;
  TokenizerFile file_;
};

// One replacement for each printable symbol whose token spells another symbol: case folding, U to T, IUPAC to
// N.
json make_normaliser(const Vocabulary& vocabulary) {
  json steps = json::array();
  for (uint8_t c = 0x21; c < 0x7f; ++c) {
    const int32_t id = vocabulary.id(c);
    if (id < 0 || vocabulary.is_special(id)) continue;
    const std::string symbol(1, static_cast<char>(c));
    const std::string& spelled = vocabulary.text(id);
    if (spelled != symbol)
      steps.push_back({{"type", "Replace"}, {"pattern", {{"String", symbol}}}, {"content", spelled}});
  }
  if (steps.empty()) return nullptr;
  return {{"type", "Sequence"}, {"normalizers", steps}};
}

json make_post_processor(const Vocabulary& vocabulary, bool add_bos) {
  const json first{{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const json second{{"Sequence", {{"id", "B"}, {"type_id", 0}}}};
  if (!add_bos || !vocabulary.special().bos) return nullptr;
  const int32_t id = *vocabulary.special().bos;
  const std::string& text = vocabulary.text(id);
  const json bos{{"SpecialToken", {{"id", text}, {"type_id", 0}}}};
  return {{"type", "TemplateProcessing"},
          {"single", {bos, first}},
          {"pair", {bos, first, bos, second}},
          {"special_tokens", {{text, {{"id", text}, {"ids", {id}}, {"tokens", {text}}}}}}};
}

}  // namespace

TokenizerFile read_tokenizer_file(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return read_tokenizer_file(path / "tokenizer.json");
  if (!std::filesystem::exists(path, ignored))
    throw user_error(
        "tokenizer_name_or_path: no file '{}'; give nucleotide, dna, protein or the path of a tokenizer.json",
        path.string());
  try {
    return Reader(path).read();
  } catch (const json::exception& e) {
    throw user_error("{}: not a tokenizer that can be used ({})", path.string(), e.what());
  }
}

json make_tokenizer_json(const Vocabulary& vocabulary, bool add_bos) {
  json vocab = json::object();
  json added = json::array();
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    const std::string& text = vocabulary.text(id);
    if (text.empty()) continue;
    vocab[text] = id;
    if (!vocabulary.is_special(id)) continue;
    added.push_back({{"id", id},
                     {"content", text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const auto unk = vocabulary.special().unk;
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", make_normaliser(vocabulary)},
          {"pre_tokenizer",
           {{"type", "Split"},
            {"pattern", {{"Regex", "[\\s\\S]"}}},
            {"behavior", "Isolated"},
            {"invert", false}}},
          {"post_processor", make_post_processor(vocabulary, add_bos)},
          {"decoder", {{"type", "Fuse"}}},
          {"model",
           {{"type", "WordLevel"}, {"vocab", vocab}, {"unk_token", unk ? vocabulary.text(*unk) : "<UNK>"}}}};
}

json make_tokenizer_config_json(const Vocabulary& vocabulary) {
  json config{{"tokenizer_class", "PreTrainedTokenizerFast"},
              {"clean_up_tokenization_spaces", false},
              {"model_max_length", 1000000000000000019LL}};
  const SpecialTokens& special = vocabulary.special();
  const auto name = [&](const char* key, const std::optional<int32_t>& id) {
    if (id) config[key] = vocabulary.text(*id);
  };
  name("bos_token", special.bos);
  name("eos_token", special.eos);
  name("pad_token", special.pad);
  name("unk_token", special.unk);
  return config;
}

}  // namespace biomoe::internal
