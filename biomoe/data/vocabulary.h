// Vocabulary: which token id a sequence symbol becomes, and back.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "biomoe/data/data_config.h"

namespace biomoe {

enum class Alphabet { kNucleotide, kProtein };

struct SpecialTokens {
  std::optional<int32_t> bos, eos, pad, unk;
};

// nucleotide  V = 256. The id is the byte value; 0 EOS, 1 PAD, 2 BOS, 3 UNK: the ids of Evo 2, OpenGenome2
// and
//             BioNeMo's nucleotide tokenizer.
// dna         V = 16. 0 EOS, 1 PAD, 2 BOS, 3 UNK, 4-8 A C G T N, 9-13 a c g t n, 14-15 reserved. U reads as
// T,
//             every other IUPAC code as N, everything else as UNK.
// protein     V = 32. The same specials, 4-23 the twenty amino acids in alphabetical order, 24-31
//             X B Z U O J * -; everything else is UNK. Lower case always reads as upper case.
// tokenizer.json  a Hugging Face tokenizer of single characters (WordLevel, or BPE without merges).
//
// With fold_case, lower-case letters read as upper case before anything else.
class Vocabulary {
 public:
  static Vocabulary nucleotide(bool fold_case = true);
  static Vocabulary dna(bool fold_case = true);
  static Vocabulary protein();
  // `path` is a tokenizer.json or a folder with one. The special tokens are taken from a
  // tokenizer_config.json or special_tokens_map.json beside it, else by their usual names. It is read as
  // protein when all twenty amino acids and no digit are tokens. Throws user_error for a tokenizer that is
  // not one symbol to one token.
  static Vocabulary from_tokenizer_json(const std::filesystem::path& path, bool fold_case = true);
  // What tokenizer_name_or_path names, with the case that `policy` wants. Throws user_error; also when the
  // policy is `keep` and the vocabulary has no lower-case tokens.
  static Vocabulary open(const std::string& name_or_path, SoftMaskedPolicy policy);

  const std::string& name() const { return name_; }
  Alphabet alphabet() const { return alphabet_; }
  int64_t size() const { return static_cast<int64_t>(texts_.size()); }  // V
  const SpecialTokens& special() const { return special_; }

  // -1 for a symbol that the vocabulary cannot express (no token, and no UNK token).
  int32_t id(uint8_t symbol) const { return ids_[symbol]; }
  const std::array<int32_t, 256>& ids() const { return ids_; }

  bool tells_case() const;  // 'a' and 'A' are two tokens, neither of them UNK

  // Symbols that mask_degenerate_bases keeps out of the loss: for nucleotides all but A C G T U, for protein
  // all but the twenty amino acids, U, O and the stop '*'; in either case.
  bool is_degenerate(uint8_t symbol) const { return degenerate_[symbol]; }
  // Ids that symbols are read as and that are not degenerate: what a generator may emit as sequence.
  bool is_base(int32_t token) const;

  // IUPAC complement by symbol, case kept; A gives T in RNA too. Throws user_error for protein.
  const std::array<uint8_t, 256>& complement() const;

  // The symbol (UTF-8) or the name of a special token, "" for an unused id. Throws for ids outside [0, V).
  const std::string& text(int32_t token) const;
  bool is_special(int32_t token) const;

  // A tokenizer that transformers' AutoTokenizer opens (PreTrainedTokenizerFast) and that gives the same ids
  // as id(), with BOS in front when `add_bos`.
  nlohmann::json tokenizer_json(bool add_bos) const;
  nlohmann::json tokenizer_config_json() const;
  // Writes tokenizer.json and tokenizer_config.json into `folder`. Throws failure when it cannot.
  void write(const std::filesystem::path& folder, bool add_bos) const;

 private:
  Vocabulary(std::string name, Alphabet alphabet, size_t size);
  void set_special(const std::vector<std::string>& names);
  void fold();
  void mark_degenerate();

  std::string name_;
  Alphabet alphabet_;
  std::vector<std::string> texts_;
  std::vector<bool> is_special_;
  SpecialTokens special_;
  std::array<int32_t, 256> ids_{};
  std::array<bool, 256> degenerate_{};
};

}  // namespace biomoe
