// Ranks on GPUs, under mpiexec: with a GPU each where there are enough, else sharing them.
#include <csignal>

#include "biomoe/core/clock.h"
#include "biomoe/core/file.h"
#include "biomoe/ops/device.h"
#include "tests/mpi/mpi_run.h"

namespace biomoe::test {
namespace {

using ::testing::HasSubstr;

class CudaRanks : public MpiRun {
 protected:
  void SetUp() override {
    MpiRun::SetUp();
    if (device_count(Device::kCuda) == 0) GTEST_SKIP() << "needs a GPU";
  }
  // A run in which a step is always four micro-batches, of a model that the GPU's grouped products take.
  std::vector<std::string> gpu_training(const std::string& run, int ranks,
                                        std::vector<std::string> overrides) const {
    overrides.insert(overrides.end(),
                     {"device=cuda", "config_kwargs.hidden_size=128", "config_kwargs.intermediate_size=256",
                      "config_kwargs.num_attention_heads=4", "lr_scheduler_kwargs.num_decay_steps=12"});
    if (device_count(Device::kCuda) < ranks) overrides.push_back("parallelism.share_gpus=true");
    return training(run, ranks, std::move(overrides));
  }
  // The largest relative difference of a figure between two runs, of all steps or of the first so many.
  double difference(const char* key, const std::string& a, const std::string& b, size_t steps = 0) const {
    auto first = step_metrics(a), second = step_metrics(b);
    EXPECT_EQ(first.size(), second.size());
    if (steps > 0) {
      first.resize(steps);
      second.resize(steps);
    }
    double largest = 0;
    for (size_t i = 0; i < std::min(first.size(), second.size()); ++i) {
      const double want = second[i][key].get<double>();
      largest = std::max(largest, std::abs(first[i][key].get<double>() - want) / std::abs(want));
    }
    RecordProperty(a + " " + key, fmt::format("{:.2e}", largest));
    return largest;
  }
};

TEST_F(CudaRanks, TheSanityCheckPasses) {
  const std::string source = BIOMOE_SOURCE_DIR;
  const bool share = device_count(Device::kCuda) < 2;
  const Outcome outcome =
      run_ranks(2, {"train", "--config", source + "/configs/L0_sanity.yaml", "device=cuda", "run_dir=sanity",
                    fmt::format("parallelism.share_gpus={}", share),
                    "dataset.path=" + source + "/configs/data/lambda_phage.fa"});
  EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
  EXPECT_THAT(outcome.out, ::testing::EndsWith("PASS\n"));
  EXPECT_THAT(outcome.out, HasSubstr("the same bits on all 2 ranks"));
}

// One GPU sums the gradients of its micro-batches in fp32, and so do ranks with more than one. So the first
// step is the same but for the order of sums. After a few more, weights in bf16 and near ties of the routers
// make two trajectories of them: on two H200 four steps differed by 4e-5, 2e-4 and 8e-5, twelve by 3e-3,
// 3e-2 and 4e-1.
TEST_F(CudaRanks, RanksTrainAsOneGpuDoes) {
  ASSERT_EQ(run(gpu_training("one", 1, {"num_train_steps=4"})).status, 0);
  for (const int ep : {1, 2}) {
    const std::string run = "ep" + std::to_string(ep);
    const Outcome outcome = run_ranks(
        2, gpu_training(run, 2, {"num_train_steps=4", "parallelism.ep_size=" + std::to_string(ep)}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    for (const char* key : {"loss", "aux_loss", "grad_norm"}) {
      EXPECT_LT(difference(key, run, "one", 1), 1e-6);
      EXPECT_LT(difference(key, run, "one"), 1e-3);
    }
  }
}

// With twice the micro-batches, so that four ranks sum the gradients of theirs in fp32 too.
TEST_F(CudaRanks, FourRanksTrainAsOneGpuDoes) {
  const auto twice = [this](const std::string& run, int ranks, const std::vector<std::string>& overrides) {
    auto arguments = gpu_training(run, ranks, overrides);
    std::erase(arguments, fmt::format("grad_acc_steps={}", 4 / ranks));
    arguments.push_back(fmt::format("grad_acc_steps={}", 8 / ranks));
    return arguments;
  };
  ASSERT_EQ(run(twice("one", 1, {"num_train_steps=4"})).status, 0);
  for (const int ep : {1, 2, 4}) {
    const std::string run = "ep" + std::to_string(ep);
    const Outcome outcome =
        run_ranks(4, twice(run, 4, {"num_train_steps=4", "parallelism.ep_size=" + std::to_string(ep)}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    for (const char* key : {"loss", "aux_loss", "grad_norm"}) {
      EXPECT_LT(difference(key, run, "one", 1), 1e-6);
      EXPECT_LT(difference(key, run, "one"), 1e-3);
    }
  }
}

// Four ranks have a micro-batch each, whose gradients are summed in the same order either way. The sharded
// run is stopped once and goes on. In 8 bits layers take turns at memory for codes.
TEST_F(CudaRanks, ShardedParametersTrainBitForBitAsCopiesDo) {
  const struct {
    int ep;
    const char *states, *recipe;
  } cases[] = {
      {1, "bf16", ""}, {2, "fp32", ""}, {1, "bf16", "MXFP8BlockScaling"}, {2, "fp32", "Float8BlockScaling"}};
  for (const auto& [ep, states, recipe] : cases) {
    const auto name = [&](bool sharded) {
      return fmt::format("{}{}{}", sharded ? "sharded" : "copied", ep, recipe);
    };
    const auto train = [&](bool sharded, const char* steps) {
      std::vector<std::string> settings{"config_kwargs.num_hidden_layers=5",
                                        "deterministic=true",
                                        steps,
                                        fmt::format("parallelism.shard_parameters={}", sharded),
                                        fmt::format("parallelism.ep_size={}", ep),
                                        fmt::format("optimizer_states={}", states)};
      if (*recipe) {
        settings.push_back("fp8_config.enabled=true");
        settings.push_back(fmt::format("fp8_config.fp8_recipe={}", recipe));
      }
      const Outcome outcome = run_ranks(4, gpu_training(name(sharded), 4, settings));
      ASSERT_EQ(outcome.status, 0) << outcome.err;
      EXPECT_EQ(outcome.out.find("parameters sharded") != std::string::npos, sharded);
    };
    train(false, "num_train_steps=6");
    train(true, "num_train_steps=3");
    train(true, "num_train_steps=6");
    for (const char* key : {"loss", "aux_loss", "grad_norm"})
      EXPECT_EQ(difference(key, name(true), name(false)), 0.0) << ep << " " << recipe;
  }
}

// Two ranks have two, and sum their gradients one after the other.
TEST_F(CudaRanks, ShardedParametersSumSeveralMicroBatches) {
  ASSERT_EQ(run(gpu_training("one", 1, {"num_train_steps=1", "config_kwargs.num_hidden_layers=5"})).status,
            0);
  for (const int ep : {1, 2}) {
    const std::string run = fmt::format("ep{}", ep);
    const Outcome outcome = run_ranks(
        2, gpu_training(run, 2,
                        {"num_train_steps=1", "config_kwargs.num_hidden_layers=5",
                         "parallelism.shard_parameters=true", fmt::format("parallelism.ep_size={}", ep)}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    for (const char* key : {"loss", "aux_loss", "grad_norm"}) EXPECT_LT(difference(key, run, "one"), 1e-6);
  }
}

// In 8 bits as well: the scales of DelayedScaling are those of all ranks. Codes near a tie fall to either
// side with the order of sums.
TEST_F(CudaRanks, RanksTrainInEightBitsAsOneGpuDoes) {
  for (const char* recipe : {"Float8BlockScaling", "MXFP8BlockScaling", "DelayedScaling"}) {
    const std::vector<std::string> settings{"num_train_steps=4", "fp8_config.enabled=true",
                                            std::string("fp8_config.fp8_recipe=") + recipe};
    const std::string one = std::string("one") + recipe;
    ASSERT_EQ(run(gpu_training(one, 1, settings)).status, 0);
    for (const int ep : {1, 2}) {
      const std::string run = recipe + std::to_string(ep);
      auto own = settings;
      own.push_back("parallelism.ep_size=" + std::to_string(ep));
      const Outcome outcome = run_ranks(2, gpu_training(run, 2, own));
      ASSERT_EQ(outcome.status, 0) << outcome.err;
      EXPECT_LT(difference("loss", run, one, 1), 1e-5) << recipe << " ep " << ep;
      EXPECT_LT(difference("loss", run, one), 2e-3) << recipe << " ep " << ep;
    }
  }
}

// Rows lie in the same order either way.
TEST_F(CudaRanks, MessagesAndDirectStoresGiveTheSameBits) {
  for (const char* dispatcher : {"p2p", "nccl"}) {
    const Outcome outcome =
        run_ranks(2, gpu_training(dispatcher, 2,
                                  {"num_train_steps=6", "deterministic=true", "parallelism.ep_size=2",
                                   std::string("parallelism.dispatcher=") + dispatcher}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr(std::string("(") + dispatcher + ")"));
  }
  for (const char* key : {"loss", "grad_norm"}) EXPECT_EQ(difference(key, "nccl", "p2p"), 0.0);
}

TEST_F(CudaRanks, ARunThatIsInterruptedGoesOnBitForBit) {
  for (const int ep : {1, 2}) {
    const std::string size = "parallelism.ep_size=" + std::to_string(ep);
    const std::string whole = "whole" + std::to_string(ep), parts = "parts" + std::to_string(ep);
    for (const char* states : {"optimizer_states=fp32", "optimizer_states=bf16"}) {
      const std::string tail = states + 17;
      ASSERT_EQ(run_ranks(2, gpu_training(whole + tail, 2,
                                          {size, states, "deterministic=true", "num_train_steps=8"}))
                    .status,
                0);
      for (const char* steps : {"num_train_steps=3", "num_train_steps=8"}) {
        const Outcome outcome =
            run_ranks(2, gpu_training(parts + tail, 2, {size, states, "deterministic=true", steps}));
        ASSERT_EQ(outcome.status, 0) << outcome.err;
      }
      for (const char* key : {"loss", "grad_norm"})
        EXPECT_EQ(difference(key, parts + tail, whole + tail), 0.0);
    }
  }
}

TEST_F(CudaRanks, ACheckpointGoesFromAnyRanksToAnyOthers) {
  ASSERT_EQ(run(gpu_training("one", 1, {"num_train_steps=8"})).status, 0);
  struct Part {
    int ranks, ep;
    const char* device;
  };
  int64_t steps = 0;
  for (const Part& part : {Part{2, 2, "cuda"}, Part{2, 1, "cuda"}, Part{1, 1, "cuda"}, Part{2, 2, "cpu"}}) {
    steps += 2;
    auto arguments = gpu_training(
        "moving", part.ranks,
        {"num_train_steps=" + std::to_string(steps), "parallelism.ep_size=" + std::to_string(part.ep)});
    for (std::string& argument : arguments) {
      if (argument == "device=cuda") argument = fmt::format("device={}", part.device);
    }
    const Outcome outcome = part.ranks == 1 ? run(arguments) : run_ranks(part.ranks, arguments);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
  }
  EXPECT_LT(difference("loss", "moving", "one"), 4e-3);
  EXPECT_EQ(run({"checkpoint", "verify", "moving"}).status, 0);
}

TEST_F(CudaRanks, ARankThatStopsAnsweringIsNamed) {
  const std::vector<std::string> settings{"num_train_steps=1000000", "checkpoint.save_every_n_steps=5",
                                          "parallelism.ep_size=2", "parallelism.timeout_s=3"};
  Child child(mpiexec(program(2, gpu_training("run", 2, settings))));
  ASSERT_TRUE(wait_for_file("run/checkpoints/latest"));
  const auto ranks = children(child.pid());
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_THAT(stop_rank(child, ranks[1], 50).err, HasSubstr("did not complete within"));
}

TEST_F(CudaRanks, TwoRanksOnOneGpuAreRefused) {
  auto arguments = gpu_training("run", 2, {"parallelism.ep_size=2"});
  std::erase(arguments, "parallelism.share_gpus=true");
  Command command = mpiexec(program(2, arguments));
  command.environment.push_back("CUDA_VISIBLE_DEVICES=0");
  const Outcome outcome = Child(command).wait();
  EXPECT_EQ(outcome.status, 2) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("was given the same GPU"));
}

}  // namespace
}  // namespace biomoe::test
