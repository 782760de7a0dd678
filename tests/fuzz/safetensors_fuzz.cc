// Any bytes as a safetensors file: refused with an Error, or every tensor can be read.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "biomoe/checkpoint/convert.h"
#include "biomoe/checkpoint/safetensors.h"
#include "biomoe/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace biomoe;
  try {
    const SafetensorsFile file = SafetensorsFile::from_bytes({data, size}, "fuzz.safetensors");
    uint64_t covered = 0;
    for (const auto& entry : file.entries()) {
      std::vector<uint8_t> bytes(entry.bytes);
      file.read(entry, bytes.data());
      if (is_float_type(entry.dtype)) {
        std::vector<float> values(static_cast<size_t>(entry.num_elements()));
        file.read_f32(entry, values.data());
      }
      BM_CHECK(file.find(entry.name) == &entry, "{} is not found by its name", entry.name);
      BM_CHECK(entry.bytes == static_cast<uint64_t>(entry.num_elements()) * dtype_size(entry.dtype),
               "size of {}", entry.name);
      covered += entry.bytes;
    }
    BM_CHECK(covered == file.data_bytes(), "{} of {} bytes are covered", covered, file.data_bytes());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUser) __builtin_trap();
  }
  return 0;
}
