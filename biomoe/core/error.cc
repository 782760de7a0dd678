#include "biomoe/core/error.h"

#include <string_view>

namespace biomoe::internal {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::string_view name(file);
  if (auto at = name.rfind("biomoe/"); at != std::string_view::npos) name.remove_prefix(at);
  throw failure("{} (check `{}` failed at {}:{})", message, condition, name, line);
}

}  // namespace biomoe::internal
