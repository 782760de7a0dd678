// Text for people beside the work: notes, progress, messages.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

namespace biomoe {

namespace internal {
void write_or_lose(std::FILE* out, std::string_view text);
}  // namespace internal

// Writes at once. What cannot be written (a closed pipe, a full disk) is lost, and `out` is as if it had
// been: the work that it tells of goes on.
template <typename... Args>
void tell(std::FILE* out, fmt::format_string<Args...> format, Args&&... args) {
  internal::write_or_lose(out, fmt::format(format, std::forward<Args>(args)...));
}

// With line ends and other control characters, which names and texts of files may hold, escaped.
std::string one_line(std::string_view text);

}  // namespace biomoe
