#include "biomoe/core/console.h"

#include <stdio_ext.h>  // __fpurge

namespace biomoe::internal {

void write_or_lose(std::FILE* out, std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), out);
  if (std::fflush(out) == 0 && !std::ferror(out)) return;
  __fpurge(out);  // else it would stand before the next text and fail again
  std::clearerr(out);
}

}  // namespace biomoe::internal
