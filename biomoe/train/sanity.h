// What a short run must show of the machine that it ran on.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "biomoe/dist/mesh.h"
#include "biomoe/model/model.h"

namespace biomoe {

struct SanityReport {
  std::vector<std::string> passed, failed;  // one line each
  bool ok() const { return failed.empty(); }
};

struct SanityInputs {
  Model& model;
  const Mesh& mesh;
  std::optional<double> first_loss;  // of the first step of the run, if it is known
  double last_loss = 0;
  int64_t steps = 0;
  bool complete_before = false;  // no step was made now
  std::string checkpoint;        // "" for none
};

// Whether the ranks that hold copies of weights have the same bits in them; true where they shard them, or
// one rank is alone. All ranks call it and get the same answer.
bool same_copies(Model& model, const Mesh& mesh);

// All ranks call it and get the same report: the loss fell, copies of weights are the same bits on the ranks
// that hold them, the checkpoint reads back.
SanityReport check_sanity(const SanityInputs& inputs);

}  // namespace biomoe
