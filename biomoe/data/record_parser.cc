#include "biomoe/data/record_parser.h"

#include <array>

#include "biomoe/data/alphabet.h"

namespace biomoe::internal {
namespace {

enum SymbolClass : uint8_t { kRefused, kSkipped, kPrintableOnly, kKept };

constexpr std::array<uint8_t, 256> symbol_classes() {
  std::array<uint8_t, 256> classes{};
  for (int c = 0x21; c < 0x7f; ++c)
    classes[static_cast<size_t>(c)] = is_letter(static_cast<uint8_t>(c)) ? kKept : kPrintableOnly;
  for (const char c : std::string_view("*-.")) classes[static_cast<uint8_t>(c)] = kKept;
  for (const char c : std::string_view(" \t\v\f")) classes[static_cast<uint8_t>(c)] = kSkipped;
  return classes;
}
constexpr std::array<uint8_t, 256> kSymbolClasses = symbol_classes();

bool all_letters(std::string_view text) {
  uint8_t other = 0;
  for (const char c : text) {
    const auto folded = static_cast<uint8_t>(static_cast<uint8_t>(c) | 0x20);
    other |= static_cast<uint8_t>(folded < 'a') | static_cast<uint8_t>(folded > 'z');
  }
  return other == 0;
}

std::string_view hint_for(char symbol) {
  if (symbol == '>') return "; a line end is missing before this '>'";
  if (symbol >= '0' && symbol <= '9') return "; remove position numbers";
  return "; letters, '*', '-' and '.' are";
}

}  // namespace

int64_t RecordParser::append_symbols(std::string_view text, SymbolSet set) {
  if (text.empty()) return 0;
  if (all_letters(text)) {
    sink_.append(text);
    return static_cast<int64_t>(text.size());
  }
  compacted_.clear();
  for (const char c : text) {
    const uint8_t symbol_class = kSymbolClasses[static_cast<uint8_t>(c)];
    if (symbol_class == kSkipped) continue;
    if (symbol_class == kRefused || (symbol_class == kPrintableOnly && set == SymbolSet::kSequence)) {
      const std::string what = describe_symbol(static_cast<uint8_t>(c));
      if (symbol_class == kRefused) throw error("{} in a sequence: not a text file of sequences?", what);
      throw error("{} is not a sequence symbol{}", what, hint_for(c));
    }
    compacted_ += c;
  }
  if (!compacted_.empty()) sink_.append(compacted_);
  return static_cast<int64_t>(compacted_.size());
}

void HeaderName::clear() {
  name_.clear();
  done_ = false;
}

bool HeaderName::add(std::string_view text, std::string& fault) {
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if ((byte < 0x20 && !is_blank(c)) || byte == 0x7f) {
      fault = fmt::format("{} in a header: not a text file of sequences?", describe_symbol(byte));
      return false;
    }
    if (is_blank(c)) {
      done_ = !name_.empty() || done_;
    } else if (!done_) {
      name_ += c;
    }
  }
  if (name_.size() <= kMaxBytes) return true;
  fault = fmt::format("a name of more than {} bytes", kMaxBytes);
  return false;
}

std::string HeaderName::name() const {
  return printable_utf8(name_);
}

}  // namespace biomoe::internal
