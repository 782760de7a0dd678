#include "biomoe/config/launch.h"

#include <gtest/gtest.h>

#include <map>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

Launch with(const std::map<std::string, std::string>& variables) {
  return read_launch([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(Launch, TorchrunTellsWhereRankZeroIs) {
  std::map<std::string, std::string> variables{{"WORLD_SIZE", "4"}, {"RANK", "3"}};
  EXPECT_EQ(with(variables).host, "");
  EXPECT_EQ(with(variables).port, 0);
  variables["MASTER_ADDR"] = "node1";
  variables["MASTER_PORT"] = "29500";
  EXPECT_EQ(with(variables).rank, 3);
  EXPECT_EQ(with(variables).host, "node1");
  EXPECT_EQ(with(variables).port, 29500);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";  // torchrun has that port
  EXPECT_EQ(with(variables).port, 29501);
}

TEST(Launch, LaunchersAreToldByTheirVariables) {
  const struct {
    std::map<std::string, std::string> variables;
    Launcher launcher;
    int64_t processes;
  } rows[] = {
      {{}, Launcher::kNone, 1},
      {{{"OMPI_COMM_WORLD_SIZE", "4"}}, Launcher::kMpi, 4},
      {{{"PMI_SIZE", "2"}, {"SLURM_STEP_NUM_TASKS", "2"}}, Launcher::kMpi, 2},
      {{{"PMIX_RANK", "0"}, {"SLURM_STEP_NUM_TASKS", "8"}}, Launcher::kMpi, 8},
      {{{"SLURM_STEP_NUM_TASKS", "8"}}, Launcher::kSrun, 8},
      {{{"SLURM_STEP_NUM_TASKS", "1"}}, Launcher::kNone, 1},
      {{{"SLURM_NTASKS", "8"}}, Launcher::kNone, 1},  // in a batch script, outside srun
      {{{"WORLD_SIZE", "2"}, {"RANK", "1"}}, Launcher::kTorchrun, 2},
      {{{"WORLD_SIZE", "1"}, {"RANK", "0"}}, Launcher::kNone, 1},
      {{{"WORLD_SIZE", "2"}}, Launcher::kNone, 1},
      {{{"OMPI_COMM_WORLD_SIZE", "two"}}, Launcher::kNone, 1},
      {{{"RANK", "x"}}, Launcher::kNone, 1},
  };
  for (const auto& row : rows) {
    const Launch launch = with(row.variables);
    EXPECT_EQ(launch.launcher, row.launcher);
    EXPECT_EQ(launch.processes, row.processes);
  }
}

TEST(Launch, WhatIsNoNumberIsRefused) {
  for (const char* value : {"", "x", "-1", "70000", "9999999999999999999", "2 "}) {
    for (const char* name : {"WORLD_SIZE", "RANK"}) {
      std::map<std::string, std::string> variables{{"WORLD_SIZE", "2"}, {"RANK", "0"}};
      variables[name] = value;
      EXPECT_THROW(with(variables), Error) << name << "=" << value;
    }
  }
}

}  // namespace
}  // namespace biomoe
