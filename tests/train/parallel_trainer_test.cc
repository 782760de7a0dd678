// Whole runs on threads as ranks: what they leave, and going on from it at other layouts.
#include <gmock/gmock.h>

#include <array>
#include <atomic>
#include <cmath>

#include "biomoe/checkpoint/hf_export.h"
#include "biomoe/checkpoint/ranked_save.h"
#include "biomoe/train/loaded_model.h"
#include "tests/ranks.h"
#include "tests/train/trainer_test_util.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using test::metrics;
using test::TempFolder;
using test::tensor_files;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMicroBatches = 4;  // of a step, over all ranks

RunConfig run_in(const TempFolder& folder) {
  RunConfig config = test::tiny_run(folder);
  config.num_threads = 1;
  config.model.router_aux_loss_coef = 0.1;
  config.checkpoint.max_checkpoints = 0;
  return config;
}

void train_on(RunConfig config, MeshSize size) {
  config.parallelism.dp_size = size.dp;
  config.parallelism.ep_size = size.ep;
  config.grad_acc_steps = kMicroBatches / size.world();
  ::testing::internal::CaptureStdout();
  try {
    test::run_ranks(static_cast<int>(size.world()), [&](std::unique_ptr<Comm> world) {
      const int64_t on_host = world->size();
      auto ranks = std::make_shared<const Ranks>(Ranks{Mesh(std::move(world), size), on_host, 20});
      Trainer({config, {}}, now_seconds(), ranks).run();
    });
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  ::testing::internal::GetCapturedStdout();
}

void expect_same_steps(const RunConfig& a, const RunConfig& b, double tolerance) {
  const auto lines_a = metrics(a), lines_b = metrics(b);
  ASSERT_EQ(lines_a.size(), lines_b.size());
  for (size_t i = 0; i < lines_a.size(); ++i) {
    for (const char* key : {"loss", "aux_loss", "grad_norm", "nats_per_base", "val_nats_per_base"}) {
      if (!lines_b[i].contains(key)) continue;
      const double want = lines_b[i][key].get<double>();
      EXPECT_NEAR(lines_a[i][key].get<double>(), want, tolerance * std::abs(want)) << key << " of line " << i;
    }
    for (const char* key : {"tokens", "targets", "masked", "val_bases"}) {
      if (!lines_b[i].contains(key)) continue;
      EXPECT_EQ(lines_a[i][key], lines_b[i][key]) << key << " of line " << i;
    }
  }
}

TEST(ParallelTrainer, ARunTellsTheSameAtEveryLayout) {
  const TempFolder alone_folder;
  RunConfig alone = run_in(alone_folder);
  alone.dataset.validation_fraction = 0.3;
  alone.validation.every_n_steps = 3;
  train_on(alone, {1, 1});
  for (const MeshSize size : {MeshSize{2, 1}, MeshSize{1, 2}, MeshSize{2, 2}, MeshSize{1, 4}}) {
    const TempFolder folder;
    RunConfig config = run_in(folder);
    config.dataset = alone.dataset;
    config.validation = alone.validation;
    train_on(config, size);
    expect_same_steps(config, alone, 1e-5);
    EXPECT_TRUE(verify_checkpoint(test::step_folder(config, 7)).ok());
  }
}

TEST(ParallelTrainer, StartsFromAHuggingFaceCheckpointAtEveryLayout) {
  const TempFolder alone_folder;
  RunConfig alone = run_in(alone_folder);
  alone.num_train_steps = 3;
  train_on(alone, {1, 1});
  LoadedModel trained = load_model(test::step_folder(alone, 3), {.num_threads = 1});
  const fs::path hf = alone_folder / "hf";
  export_hf(hf, trained.model->config(), trained.model->parameters(), trained.model->weights_A().f32(), {});
  const auto from_there = [&](const TempFolder& folder) {
    RunConfig config = run_in(folder);
    config.num_train_steps = 3;
    config.init_from = hf.string();
    return config;
  };
  const TempFolder first_folder;
  const RunConfig first = from_there(first_folder);
  train_on(first, {1, 1});
  EXPECT_LT(metrics(first).front()["loss"].get<double>(), metrics(alone).front()["loss"].get<double>());
  for (const MeshSize size : {MeshSize{1, 2}, MeshSize{2, 2}, MeshSize{1, 4}}) {
    for (const bool sharded : {false, true}) {
      const TempFolder folder;
      RunConfig config = from_there(folder);
      config.parallelism.shard_parameters = sharded;
      train_on(config, size);
      expect_same_steps(config, first, 1e-5);
    }
  }
}

// Before the first step all layouts hold the same bits, so the files are those of one rank.
TEST(ParallelTrainer, RanksWriteTheFilesThatOneRankWrites) {
  const TempFolder alone_folder;
  RunConfig alone = run_in(alone_folder);
  alone.num_train_steps = 0;
  train_on(alone, {1, 1});
  for (const MeshSize size : {MeshSize{2, 1}, MeshSize{1, 2}, MeshSize{2, 2}, MeshSize{1, 4}}) {
    const TempFolder folder;
    RunConfig config = run_in(folder);
    config.num_train_steps = 0;
    train_on(config, size);
    EXPECT_TRUE(tensor_files(config, 0) == tensor_files(alone, 0)) << size.dp << " x " << size.ep;
    EXPECT_TRUE(verify_checkpoint(test::step_folder(config, 0)).ok());
    const auto header = read_checkpoint_header(test::step_folder(config, 0));
    const auto state = TrainingState::from_json(header.state, "state");
    EXPECT_EQ(state.dp, size.dp);
    EXPECT_EQ(state.ep, size.ep);
  }
}

// Layers enough that they take the rooms for whole layers in turns.
RunConfig sharded_run(const TempFolder& folder) {
  RunConfig config = run_in(folder);
  config.model.num_hidden_layers = 5;
  config.dataset.validation_fraction = 0.3;
  config.validation.every_n_steps = 3;
  return config;
}

// With a micro-batch a rank and step the sums are made in the same order.
TEST(ParallelTrainer, ShardedParametersTrainBitForBitAsCopiesDo) {
  for (const MeshSize size : {MeshSize{4, 1}, MeshSize{2, 2}, MeshSize{1, 4}}) {
    for (const int variant : {0, 1, 2, 3}) {
      const TempFolder copied_folder, sharded_folder;
      RunConfig copied = sharded_run(copied_folder), sharded = sharded_run(sharded_folder);
      for (RunConfig* config : {&copied, &sharded}) {
        config->model.tie_word_embeddings = variant == 1;
        config->recompute_layers = variant == 1 ? 4 : 0;
        config->fp8_config.enabled = variant == 2;
        config->fp8_config.fp8_recipe = Fp8Recipe::kDelayedScaling;
        config->fp8_config.fp8_recipe_kwargs.amax_history_len = 2;
        config->fp8_config.quantized_model_init_kwargs.enabled = variant == 3;
        if (variant == 3) config->fp8_config.enabled = true;
        if (variant == 3) config->fp8_config.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
      }
      sharded.parallelism.shard_parameters = true;
      train_on(copied, size);
      train_on(sharded, size);
      EXPECT_TRUE(tensor_files(copied, 7) == tensor_files(sharded, 7)) << size.dp << " x " << size.ep;
      EXPECT_EQ(metrics(copied), metrics(sharded)) << size.dp << " x " << size.ep;
    }
  }
}

TEST(ParallelTrainer, ShardedParametersSumSeveralMicroBatches) {
  const TempFolder alone_folder;
  RunConfig alone = sharded_run(alone_folder);
  train_on(alone, {1, 1});
  for (const bool tied : {false, true}) {
    RunConfig base = alone;
    const TempFolder tied_folder;
    if (tied) {
      base = sharded_run(tied_folder);
      base.model.tie_word_embeddings = true;
      train_on(base, {1, 1});
    }
    for (const MeshSize size : {MeshSize{2, 1}, MeshSize{1, 2}}) {
      const TempFolder folder;
      RunConfig config = sharded_run(folder);
      config.model.tie_word_embeddings = tied;
      config.parallelism.shard_parameters = true;
      train_on(config, size);
      expect_same_steps(config, base, 1e-5);
    }
  }
}

TEST(ParallelTrainer, ShardedAndCopiedParametersGoOnFromEachOther) {
  const TempFolder whole_folder, folder;
  RunConfig whole = sharded_run(whole_folder), changing = sharded_run(folder);
  // The end of each part would validate.
  for (RunConfig* config : {&whole, &changing}) config->dataset.validation_fraction = 0;
  train_on(whole, {2, 2});
  const std::array<std::pair<MeshSize, bool>, 4> parts{
      {{{2, 2}, true}, {{2, 2}, false}, {{4, 1}, true}, {{1, 1}, false}}};
  const std::array<int64_t, 4> ends{2, 3, 5, 7};
  for (size_t i = 0; i < parts.size(); ++i) {
    changing.parallelism.shard_parameters = parts[i].second;
    changing.num_train_steps = ends[i];
    train_on(changing, parts[i].first);
  }
  expect_same_steps(changing, whole, 1e-5);
  EXPECT_TRUE(verify_checkpoint(test::step_folder(changing, 7)).ok());
}

// make(folder) is the configuration of a run there.
template <typename Make>
void expect_resumed_bit_for_bit(const Make& make) {
  for (const MeshSize size : {MeshSize{2, 1}, MeshSize{2, 2}, MeshSize{1, 4}}) {
    const TempFolder whole_folder, stopped_folder;
    RunConfig whole = make(whole_folder), stopped = make(stopped_folder);
    train_on(whole, size);
    stopped.num_train_steps = 3;
    train_on(stopped, size);
    stopped.num_train_steps = whole.num_train_steps;
    train_on(stopped, size);
    EXPECT_TRUE(tensor_files(whole, 7) == tensor_files(stopped, 7)) << size.dp << " x " << size.ep;
    EXPECT_EQ(metrics(whole), metrics(stopped));
  }
}

TEST(ParallelTrainer, ResumingTheSameLayoutIsTheSameBits) {
  expect_resumed_bit_for_bit(run_in);
}

// The scales and histories of all experts are each rank's, and the first one's to save.
TEST(ParallelTrainer, DelayedScalingGoesOnBitForBitAndAtAnyOtherLayout) {
  const auto delayed = [](const TempFolder& folder) {
    RunConfig config = run_in(folder);
    config.fp8_config.enabled = true;
    config.fp8_config.fp8_recipe = Fp8Recipe::kDelayedScaling;
    config.fp8_config.fp8_recipe_kwargs.amax_history_len = 3;
    return config;
  };
  expect_resumed_bit_for_bit(delayed);
  const TempFolder whole_folder, moving_folder;
  RunConfig whole = delayed(whole_folder), moving = delayed(moving_folder);
  whole.num_train_steps = 4;
  train_on(whole, {1, 1});
  int64_t steps = 0;
  for (const MeshSize size : {MeshSize{1, 4}, MeshSize{1, 1}, MeshSize{2, 2}, MeshSize{1, 2}}) {
    moving.num_train_steps = ++steps;
    train_on(moving, size);
  }
  expect_same_steps(moving, whole, 1e-5);
}

TEST(ParallelTrainer, ARunGoesOnAtAnyOtherLayout) {
  const TempFolder whole_folder, moving_folder;
  RunConfig whole = run_in(whole_folder), moving = run_in(moving_folder);
  whole.num_train_steps = moving.num_train_steps = 8;
  train_on(whole, {1, 4});
  int64_t steps = 0;
  for (const MeshSize size : {MeshSize{1, 4}, MeshSize{1, 2}, MeshSize{1, 1}, MeshSize{2, 2}, MeshSize{4, 1},
                              MeshSize{1, 4}, MeshSize{2, 1}, MeshSize{1, 4}}) {
    moving.num_train_steps = ++steps;
    train_on(moving, size);
  }
  expect_same_steps(moving, whole, 1e-6);
  // What such a run leaves is a checkpoint like any other.
  const fs::path folder = test::step_folder(moving, 8);
  LoadedModel loaded = load_model(folder, {.num_threads = 1});
  const Model& model = *loaded.model;
  const HfExportReport report =
      export_hf(moving_folder / "hf", model.config(), model.parameters(), model.weights_A().f32(), {});
  EXPECT_TRUE(fs::exists(moving_folder / "hf" / "model.safetensors"));
  EXPECT_GT(report.tensors, 0);
}

// The update of step 3 throws all weights far out; both ranks then say where, and the save before it stands.
TEST(ParallelTrainer, ALossThatIsNotFiniteStopsAllRanks) {
  const TempFolder folder;
  RunConfig config = run_in(folder);
  config.num_train_steps = 2;
  train_on(config, {1, 2});
  const auto files = tensor_files(config, 2);
  config.num_train_steps = 7;
  config.schedule = {.num_warmup_steps = 0, .num_decay_steps = 0, .min_lr_ratio = 1.0};
  config.adamw.lr = 1e38;
  EXPECT_THAT(test::message_of(ErrorKind::kFailure,
                               [&] {
                                 train_on(config, {1, 2});
                               }),
              AllOf(HasSubstr("step 4: the loss is not finite"), HasSubstr("No update")));
  EXPECT_TRUE(tensor_files(config, 2) == files);
}

TEST(ParallelTrainer, ASaveThatOneRankCannotMakeFailsOnAllAndLeavesTheOneBefore) {
  const TempFolder folder;
  RunConfig config = run_in(folder);
  config.num_train_steps = 2;
  train_on(config, {2, 2});
  const auto files = tensor_files(config, 2);
  std::atomic<int> failed{0};
  test::run_ranks(4, [&](std::unique_ptr<Comm> world) {
    const CheckpointStore store(fs::path(config.run_dir) / "checkpoints");
    std::vector<float> values(4, 1.0f);
    // Elements 4 to 8 of 16 are given by two ranks, 8 to 12 by none.
    const int64_t begin = world->rank() == 2 ? 4 : 4 * world->rank();
    const std::vector<TensorGroup> groups{
        {"model", {{"x", TensorView(values.data(), DType::kF32, Shape{4}), TensorPart{Shape{16}, begin}}}}};
    try {
      save_from_ranks(store, *world, 3, groups, nlohmann::json::object());
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("write it twice"));
      ++failed;
    }
  });
  EXPECT_EQ(failed, 4);
  EXPECT_THAT(test::saved_steps(config), ::testing::ElementsAre(2));
  EXPECT_TRUE(tensor_files(config, 2) == files);
  for (const auto& entry : fs::directory_iterator(fs::path(config.run_dir) / "checkpoints"))
    EXPECT_THAT(entry.path().filename().string(), ::testing::Not(HasSubstr("partial")));
}

// What every rank gets of refusals where `change` makes rank 1's configuration another one.
void expect_refused_on_all(const RunConfig& config, const std::function<void(RunConfig&)>& change,
                           const std::string& what) {
  std::atomic<int> refused{0};
  test::run_ranks(2, [&](std::unique_ptr<Comm> world) {
    RunConfig own = config;
    if (world->rank() == 1) change(own);
    own.parallelism.dp_size = 2;
    auto ranks = std::make_shared<const Ranks>(Ranks{Mesh(std::move(world), {2, 1}), 2, 20});
    EXPECT_THAT(test::message_of(ErrorKind::kUser,
                                 [&] {
                                   Trainer({own, {}}, now_seconds(), ranks);
                                 }),
                HasSubstr(what));
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

TEST(ParallelTrainer, RanksThatReadOtherFilesAreRefused) {
  const TempFolder folder;
  const RunConfig config = run_in(folder);
  const std::string bases = read_file(config.dataset.path.front());
  const std::string other = folder.write("other.fa", bases.substr(0, bases.size() - 9) + "ACGTACGT\n");
  expect_refused_on_all(
      config, [&](RunConfig& own) { own.dataset.path = {other}; },
      "rank 1 reads other files than rank 0 for the data");
  // Weights of two models.
  RunConfig trained = config;
  trained.num_train_steps = 2;
  trained.checkpoint.save_every_n_steps = 1;
  train_on(trained, {1, 1});
  for (const int64_t step : {1, 2}) {
    LoadedModel loaded = load_model(test::step_folder(trained, step), {.num_threads = 1});
    export_hf(folder / ("hf" + std::to_string(step)), loaded.model->config(), loaded.model->parameters(),
              loaded.model->weights_A().f32(), {});
  }
  RunConfig fresh = config;
  fresh.run_dir = (folder / "fresh").string();
  fresh.init_from = (folder / "hf1").string();
  expect_refused_on_all(
      fresh, [&](RunConfig& own) { own.init_from = (folder / "hf2").string(); }, "copies of weights differ");
}

TEST(ParallelTrainer, ConfigurationsThatDifferAreRefusedByTheirKey) {
  const TempFolder folder;
  const RunConfig config = run_in(folder);
  std::atomic<int> refused{0};
  test::run_ranks(3, [&](std::unique_ptr<Comm> world) {
    RunConfig own = config;
    own.num_threads = 1 + world->rank();  // may differ
    require_same_config(*world, own);
    if (world->rank() == 2) own.adamw.lr = 5e-4;
    const std::string message = test::message_of(ErrorKind::kUser, [&] { require_same_config(*world, own); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank 2"), HasSubstr("adamw_kwargs.lr: 0.0005"),
                               HasSubstr("adamw_kwargs.lr: 0.003 on rank 0")));
    ++refused;
  });
  EXPECT_EQ(refused, 3);
}

}  // namespace
}  // namespace biomoe
