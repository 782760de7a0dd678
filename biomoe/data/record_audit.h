// RecordAudit: counts the symbols of a set of records and notes what is odd about them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "biomoe/data/sequence_reader.h"
#include "biomoe/data/vocabulary.h"

namespace biomoe {

using SymbolCounts = std::array<int64_t, 256>;  // by byte value

int64_t count_all(const SymbolCounts& counts);
int64_t count_lower_case(const SymbolCounts& counts);  // soft-masked
int64_t count_degenerate(const SymbolCounts& counts);  // IUPAC codes other than A C G T U, either case

// "1 record", "2 records"
std::string counted(int64_t count, std::string_view what);

// Warnings of each kind are listed up to `kListedPerKind`; the rest are counted in one line.
class RecordAudit : public SequenceSink {
 public:
  static constexpr int64_t kListedPerKind = 20;

  // `alphabet`: what the records are read as.
  explicit RecordAudit(Alphabet alphabet = Alphabet::kNucleotide) : alphabet_(alphabet) {}

  void begin_record(std::string_view name) override;
  void append(std::string_view symbols) override;
  void end_record() override;

  int64_t records() const { return records_; }
  const SymbolCounts& symbols() const { return symbols_; }
  // Each names the record it concerns: no name, a name seen before, no bases, nothing but N, gap symbols,
  // symbols that are no nucleotide codes, both T and U. A set whose letters are mostly no nucleotide codes is
  // taken for protein and warned of once instead; of what is read as protein, nothing is said that holds of
  // nucleotides alone.
  std::vector<std::string> warnings() const;

 private:
  enum Kind { kNoName, kDuplicate, kEmpty, kAllN, kGaps, kNotNucleotide, kMixedThymine, kNumKinds };
  struct Warnings {
    int64_t total = 0;
    std::vector<std::string> listed;
  };
  void note_name(std::string_view name);
  void warn(Kind kind, std::string text);
  bool looks_like_protein() const;

  Alphabet alphabet_;
  int64_t records_ = 0;
  SymbolCounts symbols_{};
  SymbolCounts in_record_{};
  std::string name_;
  std::unordered_set<uint64_t> seen_;      // hashes of names, so that memory stays small
  std::unordered_set<uint64_t> repeated_;  // hashes already warned of
  std::array<Warnings, kNumKinds> warnings_;
};

}  // namespace biomoe
