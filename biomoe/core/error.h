// Errors of the library: one exception type that says who can mend it.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace biomoe {

// kUser: bad configuration, arguments or files; the command line prints one line and exits with 2.
// kFailure: the work itself failed (a broken invariant, a full disk, a non-finite loss); exits with 1.
enum class ErrorKind { kUser, kFailure };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// The message is one line: what was wrong, where (file, line, key), and what to do.
template <typename... Args>
[[nodiscard]] Error user_error(fmt::format_string<Args...> format, Args&&... args) {
  return Error(ErrorKind::kUser, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
[[nodiscard]] Error failure(fmt::format_string<Args...> format, Args&&... args) {
  return Error(ErrorKind::kFailure, fmt::format(format, std::forward<Args>(args)...));
}

namespace internal {
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);
}  // namespace internal

}  // namespace biomoe

// Always on, in every build type. Use for contracts between parts of the program; for what a user can get
// wrong throw user_error(...) instead. BM_CHECK(condition, "format", args...)
#define BM_CHECK(condition, ...)                                                                    \
  do {                                                                                              \
    if (!(condition)) [[unlikely]]                                                                  \
      ::biomoe::internal::check_failed(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)); \
  } while (false)
