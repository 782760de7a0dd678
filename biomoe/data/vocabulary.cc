#include "biomoe/data/vocabulary.h"

#include <algorithm>
#include <string_view>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "biomoe/data/alphabet.h"
#include "biomoe/data/tokenizer_file.h"

namespace biomoe {
namespace {

constexpr std::string_view kAminoAcids = "ACDEFGHIKLMNPQRSTVWY";
constexpr std::string_view kOtherResidues = "XBZUOJ*-";
constexpr std::string_view kDnaSymbols = "ACGTNacgtn";
constexpr size_t kNumSpecial = 4;  // EOS, PAD, BOS, UNK: ids 0 to 3 of the vocabularies that are built in
constexpr SymbolTable kIsCertainResidue = either_case("ACDEFGHIKLMNPQRSTVWYUO*");

std::string utf8_of(size_t code) {
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
}

}  // namespace

Vocabulary::Vocabulary(std::string name, Alphabet alphabet, size_t size)
    : name_(std::move(name)), alphabet_(alphabet), texts_(size), is_special_(size, false) {
  ids_.fill(-1);
}

void Vocabulary::set_special(const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    texts_[i] = names[i];
    is_special_[i] = true;
  }
  special_ = {.bos = 2, .eos = 0, .pad = 1, .unk = 3};
  ids_.fill(3);
}

void Vocabulary::fold() {
  for (size_t c = 'a'; c <= 'z'; ++c) ids_[c] = ids_[to_upper(static_cast<uint8_t>(c))];
}

void Vocabulary::mark_degenerate() {
  const SymbolTable& certain = alphabet_ == Alphabet::kProtein ? kIsCertainResidue : kIsUnambiguousBase;
  for (size_t c = 0; c < certain.size(); ++c) degenerate_[c] = !certain[c];
}

Vocabulary Vocabulary::nucleotide(bool fold_case) {
  Vocabulary v("nucleotide", Alphabet::kNucleotide, 256);
  v.set_special({"<EOS>", "<PAD>", "<BOS>", "<UNK>"});
  for (size_t i = kNumSpecial; i < 256; ++i) {
    v.texts_[i] = utf8_of(i);
    v.ids_[i] = static_cast<int32_t>(i);
  }
  if (fold_case) v.fold();
  v.mark_degenerate();
  return v;
}

Vocabulary Vocabulary::dna(bool fold_case) {
  Vocabulary v("dna", Alphabet::kNucleotide, 16);
  v.set_special({"<EOS>", "<PAD>", "<BOS>", "<UNK>"});
  for (size_t i = 0; i < kDnaSymbols.size(); ++i) {
    const size_t id = kNumSpecial + i;
    v.texts_[id] = std::string(1, kDnaSymbols[i]);
    v.ids_[static_cast<uint8_t>(kDnaSymbols[i])] = static_cast<int32_t>(id);
  }
  for (size_t id = kNumSpecial + kDnaSymbols.size(); id < v.texts_.size(); ++id) {
    v.texts_[id] = fmt::format("<RESERVED_{}>", id);
    v.is_special_[id] = true;
  }
  for (const char c : kDegenerateBases) {
    v.ids_[static_cast<uint8_t>(c)] = v.ids_['N'];
    v.ids_[static_cast<uint8_t>(c) | 0x20] = v.ids_['n'];
  }
  v.ids_['U'] = v.ids_['T'];
  v.ids_['u'] = v.ids_['t'];
  if (fold_case) v.fold();
  v.mark_degenerate();
  return v;
}

Vocabulary Vocabulary::protein() {
  Vocabulary v("protein", Alphabet::kProtein, 32);
  v.set_special({"<EOS>", "<PAD>", "<BOS>", "<UNK>"});
  size_t id = kNumSpecial;
  for (const std::string_view symbols : {kAminoAcids, kOtherResidues})
    for (const char c : symbols) {
      v.texts_[id] = std::string(1, c);
      v.ids_[static_cast<uint8_t>(c)] = static_cast<int32_t>(id++);
    }
  v.fold();
  v.mark_degenerate();
  return v;
}

Vocabulary Vocabulary::from_tokenizer_json(const std::filesystem::path& path, bool fold_case) {
  const internal::TokenizerFile file = internal::read_tokenizer_file(path);
  const auto has = [&](char c) { return file.ids[static_cast<uint8_t>(c)] >= 0; };
  const bool protein = std::all_of(kAminoAcids.begin(), kAminoAcids.end(), has) && !has('0');
  Vocabulary v(path.string(), protein ? Alphabet::kProtein : Alphabet::kNucleotide, file.texts.size());
  v.texts_ = file.texts;
  v.is_special_ = file.is_special;
  v.special_ = file.special;
  v.ids_ = file.ids;
  if (fold_case) v.fold();
  if (v.special_.unk) std::replace(v.ids_.begin(), v.ids_.end(), -1, *v.special_.unk);
  v.mark_degenerate();
  return v;
}

Vocabulary Vocabulary::open(const std::string& name_or_path, SoftMaskedPolicy policy) {
  const bool fold_case = policy != SoftMaskedPolicy::kKeep;
  if (name_or_path == "nucleotide") return nucleotide(fold_case);
  if (name_or_path == "dna") return dna(fold_case);
  Vocabulary v = name_or_path == "protein" ? protein() : from_tokenizer_json(name_or_path, fold_case);
  if (!fold_case && !v.tells_case())
    throw user_error(
        "dataset.soft_masked=keep: the vocabulary {} has no lower-case tokens; use upper or weight",
        name_or_path);
  return v;
}

bool Vocabulary::tells_case() const {
  const int32_t lower = id('a'), upper = id('A');
  return lower >= 0 && lower != upper && lower != special_.unk;
}

bool Vocabulary::is_base(int32_t token) const {
  if (token < 0 || token >= size() || is_special(token)) return false;
  const std::string& symbol = text(token);
  if (symbol.size() != 1) return false;
  // A token that no symbol is read as (lower case under fold_case) was never trained.
  const auto byte = static_cast<uint8_t>(symbol[0]);
  return id(byte) == token && !is_degenerate(byte);
}

const std::array<uint8_t, 256>& Vocabulary::complement() const {
  if (alphabet_ == Alphabet::kProtein)
    throw user_error("{}: protein has no reverse complement; set reverse_complement_prob=0", name_);
  return kComplement;
}

const std::string& Vocabulary::text(int32_t token) const {
  BM_CHECK(token >= 0 && token < size(), "token {} of a vocabulary of {}", token, size());
  return texts_[static_cast<size_t>(token)];
}

bool Vocabulary::is_special(int32_t token) const {
  BM_CHECK(token >= 0 && token < size(), "token {} of a vocabulary of {}", token, size());
  return is_special_[static_cast<size_t>(token)];
}

nlohmann::json Vocabulary::tokenizer_json(bool add_bos) const {
  return internal::make_tokenizer_json(*this, add_bos);
}

nlohmann::json Vocabulary::tokenizer_config_json() const {
  return internal::make_tokenizer_config_json(*this);
}

void Vocabulary::write(const std::filesystem::path& folder, bool add_bos) const {
  replace_file(folder / "tokenizer.json", tokenizer_json(add_bos).dump(1) + "\n");
  replace_file(folder / "tokenizer_config.json", tokenizer_config_json().dump(1) + "\n");
}

}  // namespace biomoe
