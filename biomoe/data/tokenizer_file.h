// Reading and making the tokenizer.json of Hugging Face `tokenizers`, for vocabularies of single characters.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "biomoe/data/vocabulary.h"

namespace biomoe::internal {

struct TokenizerFile {
  std::vector<std::string> texts;  // by id; "" for an unused id
  std::vector<bool> is_special;
  SpecialTokens special;
  std::array<int32_t, 256> ids{};  // by symbol, after the tokenizer's own normaliser; -1: no token
};

// Throws user_error naming the file and the part of it that is not understood.
TokenizerFile read_tokenizer_file(const std::filesystem::path& path);

nlohmann::json make_tokenizer_json(const Vocabulary& vocabulary, bool add_bos);
nlohmann::json make_tokenizer_config_json(const Vocabulary& vocabulary);

}  // namespace biomoe::internal
