// Character classes of biological sequences (IUPAC-IUB nomenclature, Cornish-Bowden 1985 for nucleotides).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace biomoe {

inline constexpr std::string_view kUnambiguousBases = "ACGTU";
inline constexpr std::string_view kDegenerateBases = "RYSWKMBDHVN";
inline constexpr std::string_view kGapSymbols = "-.";

constexpr bool is_lower(uint8_t symbol) {
  return symbol >= 'a' && symbol <= 'z';
}
constexpr bool is_letter(uint8_t symbol) {
  return is_lower(symbol | 0x20);
}
constexpr uint8_t to_upper(uint8_t symbol) {
  return is_lower(symbol) ? static_cast<uint8_t>(symbol - 0x20) : symbol;
}

using SymbolTable = std::array<bool, 256>;

// The letters of `upper`, in either case.
constexpr SymbolTable either_case(std::string_view upper) {
  SymbolTable table{};
  for (const char c : upper) {
    const auto symbol = static_cast<uint8_t>(c);
    table[symbol] = true;
    if (is_letter(symbol)) table[symbol | 0x20] = true;
  }
  return table;
}

inline constexpr SymbolTable kIsUnambiguousBase = either_case(kUnambiguousBases);  // A C G T U
inline constexpr SymbolTable kIsDegenerateBase = either_case(kDegenerateBases);    // the other IUPAC codes
inline constexpr SymbolTable kIsGap = either_case(kGapSymbols);

// IUPAC complement, case kept; A gives T (also in RNA), U gives A; any other symbol gives itself.
constexpr std::array<uint8_t, 256> complement_table() {
  std::array<uint8_t, 256> table{};
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint8_t>(i);
  constexpr std::string_view kFrom = "ACGTURYKMBVDH";
  constexpr std::string_view kTo = "TGCAAYRMKVBHD";
  for (size_t i = 0; i < kFrom.size(); ++i) {
    table[static_cast<uint8_t>(kFrom[i])] = static_cast<uint8_t>(kTo[i]);
    table[static_cast<uint8_t>(kFrom[i]) | 0x20] = static_cast<uint8_t>(kTo[i] | 0x20);
  }
  return table;
}
inline constexpr std::array<uint8_t, 256> kComplement = complement_table();

// For messages: 'x', or "byte 0x07" for what does not print.
std::string describe_symbol(uint8_t symbol);

// The same text with every malformed UTF-8 byte replaced by '?', so that it can stand in JSON and on a
// terminal.
std::string printable_utf8(std::string_view text);

// A name for a message or a table: cut after some 100 bytes, with "..." to say so.
std::string shortened(std::string_view name);

}  // namespace biomoe
