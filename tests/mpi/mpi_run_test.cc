// Runs of several processes under mpiexec: what they compute, what they refuse, and how they end when one of
// them dies or stops answering.
#include <csignal>

#include "biomoe/core/clock.h"
#include "biomoe/core/file.h"
#include "tests/mpi/mpi_run.h"

namespace biomoe::test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(MpiRun, TheSanityCheckPasses) {
  const std::string source = BIOMOE_SOURCE_DIR;
  for (const int ranks : {2, 4}) {
    const std::string run = "sanity" + std::to_string(ranks);
    const double begin = now_seconds();
    const std::vector<std::string> arguments{"train", "--config", source + "/configs/L0_sanity.yaml",
                                             "dataset.path=" + source + "/configs/data/lambda_phage.fa",
                                             "run_dir=" + run};
    const Outcome outcome = run_ranks(ranks, arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
    EXPECT_THAT(outcome.out, ::testing::EndsWith("PASS\n"));
    EXPECT_THAT(outcome.out, HasSubstr("the loss fell from "));
    EXPECT_THAT(outcome.out, HasSubstr("the same bits on all " + std::to_string(ranks) + " ranks"));
    EXPECT_EQ(step_metrics(run).size(), 10u);
    EXPECT_LT(now_seconds() - begin, 60);
    const Outcome again = run_ranks(ranks, arguments);
    EXPECT_EQ(again.status, 0) << again.err << again.out;
    EXPECT_THAT(again.out, ::testing::EndsWith("PASS\n"));
    const size_t figures = outcome.out.find("the loss fell from ");
    EXPECT_THAT(again.out, HasSubstr(outcome.out.substr(figures, outcome.out.find('\n', figures) - figures) +
                                     " when they were made; no step was made now"));
  }
}

TEST_F(MpiRun, ASanityCheckThatFailsSaysWhy) {
  const std::string source = BIOMOE_SOURCE_DIR;
  const Outcome outcome =
      run_ranks(2, {"train", "--config", source + "/configs/L0_sanity.yaml", "run_dir=run",
                    "adamw_kwargs.lr=100", "lr_scheduler_kwargs.num_warmup_steps=0", "num_train_steps=2",
                    "dataset.path=" + source + "/configs/data/lambda_phage.fa"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.out, Not(HasSubstr("PASS")));
  EXPECT_THAT(outcome.err, HasSubstr("biomoe: rank 0: FAIL: the loss did not fall"));
}

TEST_F(MpiRun, RanksTrainAsOneDoesAndGoOnFromEachOther) {
  // The schedule of the learning rate is the same however often the run is stopped.
  const std::string decay = "lr_scheduler_kwargs.num_decay_steps=6";
  ASSERT_EQ(run(training("one", 1, {"num_train_steps=6", decay})).status, 0);
  int64_t steps = 0;
  for (const int ranks : {4, 2, 1}) {
    steps += 2;
    const std::vector<std::string> overrides{"num_train_steps=" + std::to_string(steps), decay,
                                             "parallelism.ep_size=" + std::to_string(ranks)};
    const Outcome outcome = run_ranks(ranks, training("moving", ranks, overrides));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
  }
  const auto one = step_metrics("one"), moving = step_metrics("moving");
  ASSERT_EQ(moving.size(), one.size());
  for (size_t i = 0; i < one.size(); ++i) {
    for (const char* key : {"loss", "aux_loss", "grad_norm"}) {
      const double want = one[i][key].get<double>();
      EXPECT_NEAR(moving[i][key].get<double>(), want, 1e-5 * std::abs(want)) << key << " of line " << i;
    }
  }
  EXPECT_EQ(run({"checkpoint", "export", "moving", "hf"}).status, 0);
  EXPECT_EQ(run({"checkpoint", "verify", "moving"}).status, 0);
}

TEST_F(MpiRun, WhatDoesNotFitIsRefusedBeforeAnythingIsMade) {
  const Outcome three = run_ranks(3, train_arguments("run", {"parallelism.ep_size=2"}));
  EXPECT_EQ(three.status, 2);
  EXPECT_THAT(three.err, HasSubstr("biomoe: rank 0: parallelism.ep_size=2"));
  EXPECT_EQ(three.out, "");
  const Outcome alone = run(train_arguments("run", {"parallelism.ep_size=2"}));
  expect_error(alone, 2, {"parallelism.ep_size=2", "1 are here", "mpirun -np"});
  Command torchrun = command(train_arguments("run"));
  torchrun.environment = {"RANK=0", "WORLD_SIZE=2"};
  expect_error(Child(torchrun).wait(), 2, {"WORLD_SIZE=2", "MASTER_ADDR"});
  Command srun = command(train_arguments("run"));
  srun.environment = {"SLURM_STEP_NUM_TASKS=2"};
  expect_error(Child(srun).wait(), 2, {"srun --mpi=pmix"});
  EXPECT_FALSE(fs::exists(path("run")));
}

// As torchrun starts them: without MPI.
TEST_F(MpiRun, RanksThatTorchrunStartsTrainAsThoseOfMpirun) {
  const std::vector<std::string> settings{"num_train_steps=3", "parallelism.ep_size=2"};
  ASSERT_EQ(run_ranks(2, training("mpi", 2, settings)).status, 0);
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    Command command_ = command(training("torchrun", 2, settings));
    command_.environment = {"WORLD_SIZE=2", "RANK=" + std::to_string(rank), "MASTER_ADDR=127.0.0.1",
                            "MASTER_PORT=" + std::to_string(20000 + getpid() % 20000)};
    ranks.push_back(std::make_unique<Child>(command_));
  }
  for (const auto& rank : ranks) {
    const Outcome outcome = rank->wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  }
  const auto mpi = step_metrics("mpi"), torchrun = step_metrics("torchrun");
  ASSERT_EQ(mpi.size(), 3u);
  ASSERT_EQ(torchrun.size(), 3u);
  for (size_t i = 0; i < mpi.size(); ++i) EXPECT_EQ(torchrun[i]["loss"], mpi[i]["loss"]);
}

TEST_F(MpiRun, ConfigurationsThatDifferBetweenRanksAreRefused) {
  auto arguments = program(1, train_arguments("run", {"seed=1"}));
  arguments.push_back(":");
  const auto second = program(1, train_arguments("run", {"seed=2"}));
  arguments.insert(arguments.end(), second.begin(), second.end());
  const Outcome outcome = Child(mpiexec(arguments)).wait();
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err,
              HasSubstr("rank 1 was started with another configuration than rank 0: seed: 2 there"));
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(MpiRun, ARankThatDiesInAStepEndsTheOthers) {
  const std::vector<std::string> settings{"num_train_steps=1000000", "checkpoint.save_every_n_steps=5",
                                          "parallelism.ep_size=2"};
  Child child(mpiexec(program(2, training("run", 2, settings))));
  ASSERT_TRUE(wait_for_file("run/checkpoints/latest"));
  const auto ranks = children(child.pid());
  ASSERT_EQ(ranks.size(), 2u);
  const double begin = now_seconds();
  kill(ranks[1], SIGKILL);
  const Outcome outcome = child.wait();
  EXPECT_LT(now_seconds() - begin, 30);
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(outcome.err, HasSubstr("biomoe: rank 0: told to stop (SIGTERM)"));
  EXPECT_THAT(outcome.err, HasSubstr("rank 1"));
  EXPECT_EQ(run({"checkpoint", "verify", "run"}).status, 0);
  EXPECT_TRUE(children(child.pid()).empty());
}

TEST_F(MpiRun, ARankThatStopsAnsweringIsNamed) {
  const std::vector<std::string> settings{"num_train_steps=1000000", "checkpoint.save_every_n_steps=5",
                                          "parallelism.ep_size=2", "parallelism.timeout_s=2"};
  Child child(mpiexec(program(4, training("run", 4, settings))));
  ASSERT_TRUE(wait_for_file("run/checkpoints/latest"));
  const auto ranks = children(child.pid());
  ASSERT_EQ(ranks.size(), 4u);
  const Outcome outcome = stop_rank(child, ranks[1], 10);
  EXPECT_THAT(outcome.err, HasSubstr("did not complete within"));
  EXPECT_THAT(outcome.err, HasSubstr("waiting for rank 1"));
}

// Saves all the time: the signal falls into one nearly always, and whenever it falls the last save is whole.
const std::vector<std::string> kSavesAllTheTime{"num_train_steps=1000000", "checkpoint.save_every_n_steps=1",
                                                "parallelism.ep_size=2", "config_kwargs.hidden_size=128",
                                                "config_kwargs.intermediate_size=256"};

TEST_F(MpiRun, ARankThatStopsAnsweringInASaveIsNamed) {
  auto settings = kSavesAllTheTime;
  settings.emplace_back("parallelism.timeout_s=2");
  Child child(mpiexec(program(2, training("run", 2, settings))));
  ASSERT_TRUE(wait_for_file("run/checkpoints/latest"));
  const auto ranks = children(child.pid());
  ASSERT_EQ(ranks.size(), 2u);
  ASSERT_TRUE(wait_for([&] { return saving("run"); }));
  EXPECT_THAT(stop_rank(child, ranks[0], 10).err,
              HasSubstr("did not complete within 2 s: waiting for rank 0"));
}

TEST_F(MpiRun, ARankThatDiesInASaveLeavesTheCheckpointBefore) {
  const std::vector<std::string>& settings = kSavesAllTheTime;
  for (int victim = 0; victim < 2; ++victim) {
    const std::string latest = path("run/checkpoints/latest");
    const std::string before = victim == 0 ? "" : read_file(latest);
    Child child(mpiexec(program(2, training("run", 2, settings))));
    ASSERT_TRUE(wait_for([&] { return fs::exists(latest) && read_file(latest) != before; }));
    const auto ranks = children(child.pid());
    ASSERT_EQ(ranks.size(), 2u);
    ASSERT_TRUE(wait_for([&] { return saving("run"); }));
    kill(ranks[static_cast<size_t>(victim)], SIGKILL);
    EXPECT_NE(child.wait().status, 0);
    EXPECT_EQ(run({"checkpoint", "verify", "run"}).status, 0);
  }
  const std::string name = read_file(path("run/checkpoints/latest"));
  const int64_t step = std::stoll(name.substr(name.find('_') + 1));
  const Outcome outcome = run_ranks(
      2, training("run", 2,
                  {settings[2], settings[3], settings[4], "num_train_steps=" + std::to_string(step + 2)}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST_F(MpiRun, ARankThatDiesInStartUpEndsTheOthers) {
  Child child(mpiexec(program(2, training("run", 2, {"parallelism.ep_size=2", "num_train_steps=1000000"}))));
  std::vector<int> ranks;
  ASSERT_TRUE(wait_for([&] { return (ranks = children(child.pid())).size() == 2; }));
  const double begin = now_seconds();
  kill(ranks[0], SIGKILL);
  EXPECT_NE(child.wait().status, 0);
  EXPECT_LT(now_seconds() - begin, 30);
}

}  // namespace
}  // namespace biomoe::test
