// DataReport: what opening a data set found, for the log and for summary.json.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "biomoe/data/sequence_reader.h"
#include "biomoe/data/windows.h"

namespace biomoe {

struct FileReport {
  std::string path;
  SequenceFormat format = SequenceFormat::kFasta;
  int64_t records = 0;
  int64_t bases = 0;
};

struct PartReport {
  int64_t bases = 0;
  int64_t segments = 0;
  int64_t windows = 0;
};

struct DataReport {
  std::vector<FileReport> files;
  int64_t records = 0;
  int64_t bases = 0;
  int64_t degenerate = 0;   // symbols that mask_degenerate_bases keeps out of the loss, N runs included
  int64_t soft_masked = 0;  // lower-case letters
  int64_t unknown = 0;      // symbols that become UNK
  int64_t rna_bases = 0;    // U, where the vocabulary reads it as T
  NRunTotals n_runs;        // split out, in no window
  PartReport train;
  PartReport validation;
  std::vector<std::string> warnings;  // bounded in number

  nlohmann::json json() const;
  // Lines for people, ending with a line end; long lists are cut and counted.
  std::string text() const;
};

}  // namespace biomoe
