// metrics.jsonl: one JSON object a logged step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "biomoe/core/descriptor.h"

namespace biomoe {

// Appends lines and keeps them whole: a line is handed to the system in one piece before write() returns, so
// that whoever reads along or looks at a killed run sees complete lines (but for the last one on a full
// disk).
class MetricsWriter {
 public:
  // Opens for appending, creating the file when needed. What a run that continues after `last_step` would
  // write again is taken out first: lines with a later step, and a torn end, through a new file renamed into
  // place. 0 starts from nothing. Throws user_error naming file and line when a line that is not the end
  // holds no JSON object with an integer "step", for then it is not a file of ours.
  MetricsWriter(std::filesystem::path path, int64_t last_step);

  // `line` is an object with an integer "step". Numbers are printed with the fewest digits that read back as
  // the same double. JSON has no NaN and no infinity: these become null, and "nonfinite" lists where, as
  // {"/loss": "nan"} with JSON pointers. Throws failure naming the file (a full disk).
  void write(nlohmann::ordered_json line);

 private:
  std::filesystem::path path_;
  Descriptor file_;
};

}  // namespace biomoe
