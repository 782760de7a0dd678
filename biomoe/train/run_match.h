// Whether a run goes on with what lies in its folders, or with something else.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "biomoe/checkpoint/training_state.h"
#include "biomoe/data/dataset.h"
#include "biomoe/train/run_config.h"

namespace biomoe {

// What a checkpoint keeps of a model: hf_config_json without token ids.
nlohmann::json model_json(const ModelConfig& config);

// The first key in which two models differ, as first_difference; empty when they are one.
std::string model_difference(const ModelConfig& checkpoint, const ModelConfig& run);

// user_error where init_from is of another model, or cannot be read; nothing where there is none.
void check_init_from(const RunConfig& config);

// The keys, apart from those of the model, in which two configurations train differently, as
// "seed=1 (now 2), dataset.stride=0 (now 8)"; empty when there are none. Where a run keeps its files, what it
// runs on, how long and what it tells are no such keys.
std::string training_differences(const RunConfig& before, const RunConfig& now);

// Which bases validation_fraction holds out, as text that is equal for equal splits of equal records; empty
// when it holds out none.
std::string split_id(const DataConfig& config, const Dataset& dataset);

// Of all that is read: the vocabulary, and of the sequences their numbers and a checksum.
std::string data_id(const Dataset& dataset);

// For a run that continues from `state` after steps, read from `origin`: user_error when its
// validation_fraction holds out other bases than before. Returns one line that names what else is trained
// differently now; empty when nothing is.
std::string check_continuation(const TrainingState& state, const std::string& origin, const RunConfig& config,
                               const std::string& split);

// For a run in DelayedScaling and a checkpoint that holds its scales: user_error when their histories of amax
// are of different lengths.
void check_amax_history(const TrainingState& state, const std::string& origin, const RunConfig& config);

// For a run that starts at step 0 because there are no checkpoints: user_error when run_dir holds figures or
// a configuration that it would overwrite, and they are of another run, or of this one when it had saved
// checkpoints, or of nothing that this program wrote.
void check_fresh_start(const RunConfig& config, const std::filesystem::path& checkpoints);

}  // namespace biomoe
