#include "biomoe/data/record_audit.h"

#include <fmt/format.h>

#include <functional>

#include "biomoe/data/alphabet.h"

namespace biomoe {
namespace {

int64_t count_in(const SymbolCounts& counts, const SymbolTable& table) {
  int64_t total = 0;
  for (size_t i = 0; i < counts.size(); ++i) total += table[i] ? counts[i] : 0;
  return total;
}

constexpr SymbolTable lower_case_letters() {
  SymbolTable table{};
  for (size_t i = 0; i < table.size(); ++i) table[i] = is_lower(static_cast<uint8_t>(i));
  return table;
}

constexpr SymbolTable not_nucleotide() {
  SymbolTable table{};
  for (size_t i = 0; i < table.size(); ++i)
    table[i] = !kIsUnambiguousBase[i] && !kIsDegenerateBase[i] && !kIsGap[i];
  return table;
}

constexpr SymbolTable kIsLowerCase = lower_case_letters();
constexpr SymbolTable kIsNotNucleotide = not_nucleotide();

// Of random protein, a third of the residues are no nucleotide codes (E F I L P Q); of DNA with some X, few.
constexpr int64_t kProteinOneIn = 10;

std::string symbol_list(const SymbolCounts& counts, const SymbolTable& table) {
  std::string out;
  for (size_t i = 0; i < counts.size(); ++i)
    if (table[i] && counts[i] > 0)
      out += fmt::format("{}{}", out.empty() ? "" : " ", describe_symbol(static_cast<uint8_t>(i)));
  return out;
}

}  // namespace

int64_t count_all(const SymbolCounts& counts) {
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  return total;
}

int64_t count_lower_case(const SymbolCounts& counts) {
  return count_in(counts, kIsLowerCase);
}
int64_t count_degenerate(const SymbolCounts& counts) {
  return count_in(counts, kIsDegenerateBase);
}

void RecordAudit::warn(Kind kind, std::string text) {
  Warnings& warnings = warnings_[kind];
  if (++warnings.total <= kListedPerKind) warnings.listed.push_back(std::move(text));
}

void RecordAudit::note_name(std::string_view name) {
  name_ = name;
  if (name.empty()) {
    warn(kNoName, fmt::format("record {} has no name", records_));
    return;
  }
  const uint64_t hash = std::hash<std::string_view>{}(name);
  if (!seen_.insert(hash).second && repeated_.insert(hash).second)
    warn(kDuplicate, fmt::format("record '{}': the name occurs more than once", shortened(name)));
}

std::string counted(int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

void RecordAudit::begin_record(std::string_view name) {
  ++records_;
  in_record_ = {};
  note_name(name);
}

void RecordAudit::append(std::string_view symbols) {
  for (const char c : symbols) ++in_record_[static_cast<uint8_t>(c)];
}

void RecordAudit::end_record() {
  for (size_t i = 0; i < symbols_.size(); ++i) symbols_[i] += in_record_[i];
  const int64_t bases = count_all(in_record_);
  const std::string label =
      name_.empty() ? fmt::format("record {}", records_) : fmt::format("record '{}'", shortened(name_));
  const auto either = [&](char c) {
    return in_record_[static_cast<uint8_t>(c)] + in_record_[static_cast<uint8_t>(c) | 0x20u];
  };
  if (bases == 0) return warn(kEmpty, label + " is empty");
  if (either('N') == bases) warn(kAllN, fmt::format("{} is nothing but N ({} bases)", label, bases));
  if (const int64_t gaps = count_in(in_record_, kIsGap); gaps > 0)
    warn(kGaps, fmt::format("{} holds {} gap symbols, kept and masked from the loss", label, gaps));
  if (const int64_t others = count_in(in_record_, kIsNotNucleotide); others > 0)
    warn(kNotNucleotide, fmt::format("{} holds {} symbols that are no nucleotide codes: {}", label, others,
                                     symbol_list(in_record_, kIsNotNucleotide)));
  if (either('T') > 0 && either('U') > 0) warn(kMixedThymine, label + " holds both T and U");
}

bool RecordAudit::looks_like_protein() const {
  return count_in(symbols_, kIsNotNucleotide) * kProteinOneIn > count_all(symbols_);
}

std::vector<std::string> RecordAudit::warnings() const {
  std::vector<std::string> out;
  const bool read_as_protein = alphabet_ == Alphabet::kProtein;
  const bool protein = read_as_protein || looks_like_protein();
  for (size_t kind = 0; kind < kNumKinds; ++kind) {
    const Warnings& warnings = warnings_[kind];
    if (warnings.total == 0) continue;
    if (protein && (kind == kMixedThymine || kind == kAllN)) continue;
    if (read_as_protein && kind == kNotNucleotide) continue;
    if (looks_like_protein() && kind == kNotNucleotide) {
      out.push_back(
          fmt::format("protein, by its letters ({}): {}; read it with dataset.tokenizer_name_or_path=protein",
                      counted(warnings.total, "record"), symbol_list(symbols_, kIsNotNucleotide)));
      continue;
    }
    out.insert(out.end(), warnings.listed.begin(), warnings.listed.end());
    if (const int64_t more = warnings.total - kListedPerKind; more > 0)
      out.push_back(fmt::format("... and {} more like: {}", more, warnings.listed.front()));
  }
  return out;
}

}  // namespace biomoe
