// Any bytes as a config.json: refused with an Error, or a configuration that its parameter list and its own
// JSON agree with.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace biomoe;
  try {
    const HfConfig config = parse_hf_config({reinterpret_cast<const char*>(data), size}, "fuzz.json");
    const auto written = hf_config_json(config.model, config.tokens, config.dtype.value_or(DType::kF32));
    const HfConfig again = parse_hf_config(written.dump(), "again.json");
    BM_CHECK(hf_config_json(again.model, again.tokens, again.dtype.value_or(DType::kF32)) == written,
             "the configuration changes when it is written and read");
  } catch (const Error& error) {
    const std::string_view message = error.what();
    const bool one_line = message.find('\n') == message.npos;
    const bool of_the_input =
        message.substr(0, 9) == "fuzz.json";  // what we wrote ourselves must be accepted
    if (error.kind() != ErrorKind::kUser || !one_line || !of_the_input) __builtin_trap();
  }
  return 0;
}
