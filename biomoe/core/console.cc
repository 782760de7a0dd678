#include "biomoe/core/console.h"

#include <stdio_ext.h>  // __fpurge

namespace biomoe {

void internal::write_or_lose(std::FILE* out, std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), out);
  if (std::fflush(out) == 0 && !std::ferror(out)) return;
  __fpurge(out);  // else it would stand before the next text and fail again
  std::clearerr(out);
}

std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      line += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      line += fmt::format("\\x{:02x}", byte);
    } else {
      line += c;
    }
  }
  return line;
}

}  // namespace biomoe
