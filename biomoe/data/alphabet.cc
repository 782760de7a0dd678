#include "biomoe/data/alphabet.h"

#include <fmt/format.h>

namespace biomoe {
namespace {

// Bytes of the well-formed UTF-8 character at the start of `text` (RFC 3629), 0 when it is malformed.
size_t utf8_length(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xc2 && lead <= 0xdf ? 2 : lead >= 0xe0 && lead <= 0xef ? 3 : 4;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((at(i) & 0xc0) != 0x80) return 0;
  const bool overlong = (lead == 0xe0 && at(1) < 0xa0) || (lead == 0xf0 && at(1) < 0x90);
  const bool surrogate = lead == 0xed && at(1) > 0x9f;
  const bool too_large = lead == 0xf4 && at(1) > 0x8f;
  return overlong || surrogate || too_large ? 0 : length;
}

}  // namespace

std::string describe_symbol(uint8_t symbol) {
  if (symbol > 0x20 && symbol < 0x7f) return fmt::format("'{}'", static_cast<char>(symbol));
  return fmt::format("byte 0x{:02x}", symbol);
}

std::string printable_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0) {
      out += '?';
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out;
}

std::string shortened(std::string_view name) {
  constexpr size_t kShownBytes = 100;
  if (name.size() <= kShownBytes) return std::string(name);
  size_t end = kShownBytes;
  while (end > 0 && (static_cast<uint8_t>(name[end]) & 0xc0) == 0x80) --end;  // not inside a character
  return fmt::format("{}...", name.substr(0, end));
}

}  // namespace biomoe
