// TensorBoard event files: scalars by step, for `tensorboard --logdir RUN`.
//
// A file is a sequence of TFRecords, each: length (uint64), masked CRC32C of the length, payload, masked
// CRC32C of the payload, all little-endian. A payload is an `Event` protocol buffer. Sources:
// tensorflow/core/lib/io/ record_writer.h (framing), tensorflow/core/util/event.proto and
// framework/summary.proto (field numbers), RFC 3720 appendix B.4 (CRC32C).
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/descriptor.h"

namespace biomoe {

// CRC-32C (Castagnoli) of `bytes`.
uint32_t crc32c(std::string_view bytes);

struct Scalar {
  std::string tag;  // "loss", "expert_load/0/max": tags group by what stands before the first slash
  double value;
};

// Every number of a line of metrics but its step; names inside each other are joined with '/'.
std::vector<Scalar> scalars_of(const nlohmann::ordered_json& line);

class EventWriter {
 public:
  // Creates folder/events.out.tfevents.SECONDS.HOST.PID. A run that continues after `last_step` > 0 starts
  // with a mark that makes TensorBoard forget what earlier files of the folder hold for later steps. Throws
  // failure when the file cannot be created.
  EventWriter(const std::filesystem::path& folder, int64_t last_step);

  // One event with all of `scalars`, stored as float32. Throws failure naming the file (a full disk).
  void write(int64_t step, const std::vector<Scalar>& scalars);

  const std::filesystem::path& path() const { return path_; }

 private:
  void write_record(std::string_view payload);
  std::filesystem::path path_;
  Descriptor file_;
};

}  // namespace biomoe
