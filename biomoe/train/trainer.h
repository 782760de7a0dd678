// Trainer: one run from its configuration to its final checkpoint.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "biomoe/checkpoint/async_saver.h"
#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/checkpoint/training_state.h"
#include "biomoe/data/dataset.h"
#include "biomoe/model/model.h"
#include "biomoe/optim/optimizer.h"
#include "biomoe/train/evaluation.h"
#include "biomoe/train/folder_lock.h"
#include "biomoe/train/model_image.h"
#include "biomoe/train/ranks.h"
#include "biomoe/train/run_config.h"
#include "biomoe/train/run_log.h"
#include "biomoe/train/sanity.h"
#include "biomoe/train/train_step.h"

namespace biomoe {

// Sizes and ways that a run has, and that its memory is planned for, on a device that need not be here (see
// target_capability). Throws user_error as resolved_expert_ffn_mode and resolved_fp8_config do.
ModelLimits planned_limits(const RunConfig& config, bool training, Device device);
// The same on the device that the configuration resolves to here.
ModelLimits model_limits(const RunConfig& config, bool training);
// Sets what a model over ranks needs of them: its place, and how rows go between them. All ranks call it.
void join_ranks(const Mesh& mesh, DispatcherChoice dispatcher, ModelLimits& limits);
// Whether steps of such a model can be recorded: in a loop over experts, and where rows go to other ranks in
// messages, the host waits for the routing.
bool can_record_steps(const ModelLimits& limits);
// The first rank of the mesh that the configuration asks for; it holds no less than the others.
MeshPlace planned_place(const RunConfig& config);

struct TrainSummary {
  int64_t steps = 0;
  double final_loss = 0;
  std::optional<Evaluation> validation;
  std::string checkpoint;  // folder of the last one saved, "" for none
  std::optional<SanityReport> sanity{};
};

class Trainer {
 public:
  // Opens the data, reserves memory, resumes when there is something to resume from. Nothing is written yet.
  // `started` is when the process started, for the start-up time in summary.json.
  // `ranks`: those that train together, each with a Trainer of its own and the same configuration, which
  // start_ranks has settled. The first writes the run folder and standard output.
  Trainer(ResolvedConfig<RunConfig> config, double started_seconds,
          std::shared_ptr<const Ranks> ranks = std::make_shared<Ranks>());

  // Trains to num_train_steps, validates, saves; writes the run folder. Throws failure as train_step does;
  // then the checkpoints before it are as they were.
  TrainSummary run();

 private:
  void resume();
  void prepare_folder();
  void print_head() const;
  void train(RunLog* log);  // null on ranks that write none
  void train_one_step(RunLog* log);
  MaskCounts mask_counts() const;  // since the start of training, of all ranks
  double over_ranks(double value) const;
  std::string latest_good() const;
  void require_finite_weights() const;
  void save();
  nlohmann::json state() const;
  Evaluation validate(int64_t max_batches);
  void write_summary(const TrainSummary& summary, double seconds) const;

  ResolvedConfig<RunConfig> resolved_;
  const RunConfig& config_;
  Dataset dataset_;
  std::string split_;  // split_id
  std::shared_ptr<const Ranks> ranks_;
  FolderLock lock_;  // on run_dir
  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<ModelImage> image_;
  std::unique_ptr<StepRunner> runner_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<CheckpointStore> store_;
  std::unique_ptr<AsyncSaver> saver_;
  std::vector<Batch> micro_batches_;
  int64_t step_ = 0;  // steps done
  int64_t tokens_seen_ = 0;
  int64_t saved_step_ = -1;
  double loss_ = 0;                   // of the last step that predicted something
  std::optional<double> first_loss_;  // of the first one of the run
  MaskCounts masked_before_;          // of the run that this one resumes
  double started_seconds_ = 0;
  std::optional<double> first_step_seconds_;  // from the start of the command
};

}  // namespace biomoe
