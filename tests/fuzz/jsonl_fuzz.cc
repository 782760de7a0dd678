#include "tests/fuzz/sequence_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  return biomoe::fuzz::compare_buffer_sizes(input, [](biomoe::SequenceSink& sink) {
    return biomoe::internal::jsonl_parser("input", "text", sink);
  });
}
