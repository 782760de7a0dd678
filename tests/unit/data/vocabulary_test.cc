#include "biomoe/data/vocabulary.h"

#include <gtest/gtest.h>

#include <set>

#include "biomoe/core/error.h"
#include "tests/unit/data/data_test_helpers.h"

namespace biomoe {
namespace {

using nlohmann::json;
using test::contains;
using test::error_of;
using test::TempFolder;

std::vector<int32_t> ids(const Vocabulary& v, std::string_view text) {
  std::vector<int32_t> out;
  for (const char c : text) out.push_back(v.id(static_cast<uint8_t>(c)));
  return out;
}

TEST(Vocabulary, WhatNoSymbolIsReadAsIsNoBase) {
  const Vocabulary folded = Vocabulary::dna(/*fold_case=*/true);
  int64_t bases = 0;
  for (int32_t id = 0; id < folded.size(); ++id) bases += folded.is_base(id);
  EXPECT_EQ(bases, 4);  // A C G T: lower case reads as these, U as T
  EXPECT_FALSE(folded.is_base(Vocabulary::dna(false).id('a')));
  EXPECT_FALSE(Vocabulary::nucleotide(true).is_base('a'));
  EXPECT_TRUE(Vocabulary::nucleotide(false).is_base('a'));
}

TEST(Vocabulary, NucleotideIsTheByte) {
  const Vocabulary v = Vocabulary::nucleotide(/*fold_case=*/false);
  EXPECT_EQ(v.size(), 256);
  EXPECT_EQ(ids(v, "ACGTNacgtn*"), (std::vector<int32_t>{65, 67, 71, 84, 78, 97, 99, 103, 116, 110, 42}));
  EXPECT_EQ(v.special().eos, 0);
  EXPECT_EQ(v.special().pad, 1);
  EXPECT_EQ(v.special().bos, 2);
  EXPECT_EQ(v.special().unk, 3);
  EXPECT_EQ(ids(Vocabulary::nucleotide(), "acgtU"), ids(v, "ACGTU"));
}

TEST(Vocabulary, DnaIsCompact) {
  const Vocabulary keep = Vocabulary::dna(/*fold_case=*/false);
  EXPECT_EQ(keep.size(), 16);
  EXPECT_EQ(ids(keep, "ACGTNacgtn"), (std::vector<int32_t>{4, 5, 6, 7, 8, 9, 10, 11, 12, 13}));
  EXPECT_EQ(ids(keep, "URYKMSWBDHVuryk"),
            (std::vector<int32_t>{7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 12, 13, 13, 13}));
  EXPECT_EQ(ids(keep, "E-*.|1"), std::vector<int32_t>(6, 3));
  EXPECT_EQ(ids(Vocabulary::dna(), "acgtnur"), (std::vector<int32_t>{4, 5, 6, 7, 8, 7, 8}));
  for (const char c : std::string_view("ACGTUacgtu"))
    EXPECT_FALSE(keep.is_degenerate(static_cast<uint8_t>(c))) << c;
  for (const char c : std::string_view("NRYnry-*E"))
    EXPECT_TRUE(keep.is_degenerate(static_cast<uint8_t>(c))) << c;
  int bases = 0;
  for (int32_t id = 0; id < keep.size(); ++id) bases += keep.is_base(id);
  EXPECT_EQ(bases, 8);
  const Vocabulary folded = Vocabulary::dna();  // no text holds the ids of its lower-case letters
  for (int32_t id = 0; id < folded.size(); ++id) EXPECT_EQ(folded.is_base(id), id >= 4 && id < 8) << id;
  EXPECT_EQ(keep.text(7), "T");
  EXPECT_EQ(keep.text(0), "<EOS>");
  EXPECT_THROW(keep.text(16), Error);
  EXPECT_THROW(keep.text(-1), Error);
}

TEST(Vocabulary, ProteinHasEveryResidueOnce) {
  const Vocabulary v = Vocabulary::protein();
  EXPECT_EQ(v.size(), 32);
  std::set<int32_t> seen;
  for (const char c : std::string_view("ACDEFGHIKLMNPQRSTVWYXBZUOJ*-")) {
    const int32_t id = v.id(static_cast<uint8_t>(c));
    EXPECT_GE(id, 4);
    EXPECT_TRUE(seen.insert(id).second) << c;
    EXPECT_EQ(v.text(id), std::string(1, c));
  }
  EXPECT_EQ(v.id('m'), v.id('M'));
  EXPECT_EQ(v.id('.'), v.special().unk);
  for (const char c : std::string_view("XBZJxbzj-"))
    EXPECT_TRUE(v.is_degenerate(static_cast<uint8_t>(c))) << c;
  for (const char c : std::string_view("NMWnuo*"))
    EXPECT_FALSE(v.is_degenerate(static_cast<uint8_t>(c))) << c;
  EXPECT_TRUE(contains(error_of([&] { v.complement(); }), "reverse_complement_prob=0"));
}

TEST(Vocabulary, ComplementIsItsOwnInverseButForU) {
  const auto complement = Vocabulary::dna().complement();
  const std::string from = "ACGTRYKMBVDHSWNacgtrykmbvdhswn-*";
  const std::string to = "TGCAYRMKVBHDSWNtgcayrmkvbhdswn-*";
  for (size_t i = 0; i < from.size(); ++i)
    EXPECT_EQ(complement[static_cast<uint8_t>(from[i])], static_cast<uint8_t>(to[i])) << from[i];
  EXPECT_EQ(complement['U'], 'A');
  EXPECT_EQ(complement['u'], 'a');
}

TEST(Vocabulary, AWrittenTokenizerReadsBackTheSame) {
  for (const bool fold : {true, false}) {
    for (const Vocabulary& v : {Vocabulary::nucleotide(fold), Vocabulary::dna(fold), Vocabulary::protein()}) {
      SCOPED_TRACE(v.name());
      const TempFolder folder;
      v.write(folder.path(), /*add_bos=*/true);
      const Vocabulary back = Vocabulary::from_tokenizer_json(folder.path(), /*fold_case=*/false);
      EXPECT_EQ(back.size(), v.size());
      EXPECT_EQ(back.alphabet(), v.alphabet());
      for (uint8_t c = 0x21; c < 0x7f; ++c) EXPECT_EQ(back.id(c), v.id(c)) << c;
      for (int32_t id = 0; id < v.size(); ++id) {
        EXPECT_EQ(back.text(id), v.text(id));
        EXPECT_EQ(back.is_special(id), v.is_special(id));
      }
      EXPECT_EQ(back.special().bos, v.special().bos);
      EXPECT_EQ(back.special().eos, v.special().eos);
      EXPECT_EQ(back.special().pad, v.special().pad);
      EXPECT_EQ(back.special().unk, v.special().unk);
    }
  }
}

TEST(Vocabulary, TokenizerFileHasTheShapeThatTransformersReads) {
  const json file = Vocabulary::dna().tokenizer_json(/*add_bos=*/true);
  EXPECT_EQ(file["model"]["type"], "WordLevel");
  EXPECT_EQ(file["model"]["unk_token"], "<UNK>");
  EXPECT_EQ(file["model"]["vocab"]["A"], 4);
  EXPECT_EQ(file["post_processor"]["single"][0]["SpecialToken"]["id"], "<BOS>");
  EXPECT_EQ(file["post_processor"]["special_tokens"]["<BOS>"]["ids"], json::array({2}));
  EXPECT_EQ(file["post_processor"]["special_tokens"]["<BOS>"]["tokens"], json::array({"<BOS>"}));
  EXPECT_TRUE(Vocabulary::dna().tokenizer_json(false)["post_processor"].is_null());
  EXPECT_EQ(Vocabulary::dna().tokenizer_config_json()["tokenizer_class"], "PreTrainedTokenizerFast");
}

json small_tokenizer() {
  return json::parse(R"({"added_tokens": [{"id": 5, "content": "<s>", "special": true}],
      "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"A": 0, "C": 1, "G": 2, "T": 3, "?": 4}}})");
}

std::string refusal(const json& tokenizer) {
  const TempFolder folder;
  const std::string path = folder.write("tokenizer.json", tokenizer.dump());
  ErrorKind kind = ErrorKind::kFailure;
  const std::string message = error_of([&] { Vocabulary::from_tokenizer_json(path); }, &kind);
  if (!message.empty()) {
    EXPECT_EQ(kind, ErrorKind::kUser);
    EXPECT_TRUE(contains(message, "tokenizer.json")) << message;
    EXPECT_FALSE(contains(message, "\n")) << message;
  }
  return message;
}

TEST(Vocabulary, ReadsTokenizersOfSingleCharacters) {
  const TempFolder folder;
  folder.write("tokenizer.json", small_tokenizer().dump());
  folder.write("special_tokens_map.json", R"({"eos_token": {"content": "T"}})");
  const Vocabulary v = Vocabulary::open(folder.path().string(), SoftMaskedPolicy::kUpper);
  EXPECT_EQ(v.size(), 6);
  EXPECT_EQ(ids(v, "ACGTaN"), (std::vector<int32_t>{0, 1, 2, 3, 0, 4}));
  EXPECT_EQ(v.special().bos, 5);
  EXPECT_EQ(v.special().eos, 3);
  EXPECT_EQ(v.special().unk, 4);
  EXPECT_TRUE(contains(error_of([&] { Vocabulary::open(folder.path().string(), SoftMaskedPolicy::kKeep); }),
                       "no lower-case tokens"));

  json bpe = small_tokenizer();
  bpe["model"]["type"] = "BPE";
  bpe["model"]["merges"] = json::array();
  bpe["normalizer"] = {{"type", "Lowercase"}};
  bpe["model"]["vocab"] = {{"a", 0}, {"c", 1}};
  const TempFolder other;
  const std::string path = other.write("bpe.json", bpe.dump());
  EXPECT_EQ(Vocabulary::from_tokenizer_json(path).id('A'), 0);
}

TEST(Vocabulary, RefusesTokenizersThatAreNotSymbolByByte) {
  EXPECT_EQ(refusal(small_tokenizer()), "");
  const auto with = [](const char* pointer, const json& value) {
    json tokenizer = small_tokenizer();
    tokenizer[json::json_pointer(pointer)] = value;
    return tokenizer;
  };
  EXPECT_TRUE(contains(refusal(with("/model/type", "Unigram")), "'Unigram'"));
  EXPECT_TRUE(contains(refusal(with("/model/vocab/ACG", 6)), "'ACG' is not one character"));
  EXPECT_TRUE(contains(refusal(with("/model/vocab/N", 0)), "share the id 0"));
  EXPECT_TRUE(contains(refusal(with("/model/vocab/N", -1)), "is not an integer in"));
  EXPECT_TRUE(contains(refusal(with("/model/vocab/N", 1ll << 40)), "is not an integer in"));
  EXPECT_TRUE(contains(refusal(with("/model/vocab/N", "x")), "is not an integer in"));
  EXPECT_TRUE(contains(refusal(with("/model/vocab", json::array())), "model.vocab is not an object"));
  EXPECT_TRUE(contains(refusal(with("/model/merges", json::array({"A C"}))), "has BPE merges"));
  EXPECT_TRUE(contains(refusal(with("/added_tokens", 5)), "added_tokens is not a list"));
  EXPECT_TRUE(contains(refusal(with("/added_tokens/0/content", "")), "no content"));
  EXPECT_TRUE(contains(refusal(with("/normalizer", {{"type", "BertNormalizer"}})), "'BertNormalizer'"));
  EXPECT_TRUE(contains(refusal(json::array()), "not a JSON object"));
  EXPECT_TRUE(contains(error_of([] { Vocabulary::open("nucleotides", SoftMaskedPolicy::kUpper); }),
                       "no file 'nucleotides'; give nucleotide, dna, protein"));
  EXPECT_TRUE(contains(error_of([] { Vocabulary::open("protein", SoftMaskedPolicy::kKeep); }),
                       "no lower-case tokens"));
}

}  // namespace
}  // namespace biomoe
