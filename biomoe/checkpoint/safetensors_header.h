// The JSON header of a safetensors file, read event by event: anything of another form is refused where it
// starts, so the memory used is proportional to the tensors named, not to what a hostile text nests.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/checkpoint/safetensors.h"

namespace biomoe {

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of the text
  std::map<std::string, std::string> metadata;
};

// Checks the form, the dtype, the shape against 64 bits and against the offsets; not the offsets against the
// file or one another. user_error naming `file` and the tensor.
SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file);

}  // namespace biomoe
