// Any bytes as a YAML configuration, and their lines as overrides: refused in one line, or a configuration
// that its own print-out resolves to again.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/config/config.h"
#include "biomoe/config/overrides.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

enum class Mode { kLoop, kGrouped };
constexpr std::array<std::string_view, 2> kModeNames{"loop", "grouped"};

struct Part {
  std::vector<std::string> path;
  std::vector<double> betas;
  std::optional<int64_t> window;
  Mode mode = Mode::kLoop;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("path", path, "");
    v.field("betas", betas, "");
    v.field("window", window, "");
    v.choice("mode", mode, kModeNames, "");
  }
};

struct Run {
  int64_t steps = 1;
  double lr = 1e-3;
  bool shuffle = true;
  std::string name = "run";
  std::optional<double> clip;
  std::optional<std::string> note;
  Part dataset;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("steps", steps, "");
    v.field("lr", lr, "");
    v.field("shuffle", shuffle, "");
    v.field("name", name, "");
    v.field("clip", clip, "");
    v.field("note", note, "");
    v.section("dataset", dataset);
  }
};

void expect_one_line(const Error& error) {
  const std::string_view message = error.what();
  if (error.kind() != ErrorKind::kUser || message.find('\n') != message.npos) __builtin_trap();
}

void resolve_and_print(const ConfigNode& tree) {
  ResolvedConfig<Run> run;
  try {
    run = resolve<Run>(tree);
  } catch (const Error& error) {
    expect_one_line(error);
    return;
  }
  // What we print has to be accepted, and to print the same again.
  const std::string printed = to_yaml(run.value);
  if (to_yaml(resolve<Run>(parse_yaml(printed, "printed")).value) != printed) __builtin_trap();
}

}  // namespace
}  // namespace biomoe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace biomoe;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    resolve_and_print(parse_yaml(text, "fuzz.yaml"));
  } catch (const Error& error) {
    expect_one_line(error);
  }
  ConfigNode overrides;
  overrides.kind = ConfigNode::Kind::kMap;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    try {
      apply_overrides(overrides, {std::string(line)});
    } catch (const Error& error) {
      expect_one_line(error);
    }
  }
  resolve_and_print(overrides);
  return 0;
}
