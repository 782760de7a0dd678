// Dataset: from the `dataset` section of a configuration to the parts that loaders read.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "biomoe/data/data_config.h"
#include "biomoe/data/data_report.h"
#include "biomoe/data/loader.h"
#include "biomoe/data/vocabulary.h"

namespace biomoe {

struct Dataset {
  std::shared_ptr<const SequencePart> train;
  std::shared_ptr<const SequencePart> validation;  // null without validation_path or validation_fraction
  Vocabulary vocabulary;
  DataReport report;
};

// Throws user_error, naming the key as dataset.KEY, for a value out of range or at odds with another; path
// may be empty, for what reads no data.
void validate_data_config(const DataConfig& config);

// Paths as given, globs (* ? [...]) expanded in name order; a path that exists is never taken for a glob.
// Throws user_error for a glob that matches nothing, a file that is named twice, a name that is not UTF-8.
std::vector<std::string> expand_paths(const std::vector<std::string>& patterns);

// Validates `config`, reads every file once, splits and reports. Throws user_error: as expand_paths and the
// readers do, for a file to train and to validate on, for a train or validation part without a base, for a
// symbol that the vocabulary cannot express, naming its record.
Dataset open_dataset(const DataConfig& config);

// Throws user_error where no token of the part to train on counts in the loss. Reads windows up to the first
// that has one.
void require_targets(const Dataset& dataset, const DataConfig& config);

// All of `paths` as one part, not split into train and validation, under the window and N-run policies of
// `config`; for evaluation. `config.path` and the validation keys are not read. `report`, when given, is
// filled (its train part stands for the whole).
std::shared_ptr<const SequencePart> open_sequences(const std::vector<std::string>& paths,
                                                   const DataConfig& config, const Vocabulary& vocabulary,
                                                   DataReport* report = nullptr);

// Memory that the sequences and windows of a data set hold.
size_t dataset_bytes(const Dataset& dataset);

struct RankOfWorld {
  int64_t rank = 0;
  int64_t world = 1;
};
// Training: shuffled as configured, without end. Validation: in order, once, each base scored once, never
// reverse-complemented.
LoaderOptions train_loader_options(const DataConfig& config, const RankOfWorld& place = {});
LoaderOptions validation_loader_options(const DataConfig& config, const RankOfWorld& place = {});

}  // namespace biomoe
