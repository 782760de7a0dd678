#include "biomoe/checkpoint/training_checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "biomoe/checkpoint/training_state.h"
#include "checkpoint_test_util.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::error_of;
using testing::expect_error;
using testing::FakeRun;
using testing::read_bytes;
using testing::replace_text;
using testing::TempFolder;
using testing::write_bytes;

class TrainingCheckpointTest : public ::testing::Test {
 protected:
  CheckpointStore store(int64_t max_checkpoints = 0) {
    return CheckpointStore(folder_ / "checkpoints",
                           {.max_checkpoints = max_checkpoints,
                            .max_shard_bytes = 64,
                            .warn = [this](const std::string& line) { warnings_.push_back(line); }});
  }
  SaveReport save(const CheckpointStore& into, int64_t step) {
    run_.set_step(step);
    return into.save(step, run_.groups(), {{"step", step}, {"data", {{"position", step * 7}}}});
  }
  std::vector<int64_t> steps(const CheckpointStore& in) {
    std::vector<int64_t> found;
    for (const auto& info : in.list()) found.push_back(info.step);
    return found;
  }
  std::vector<std::string> hidden() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_ / "checkpoints")) {
      if (entry.path().filename().string()[0] == '.') names.push_back(entry.path().filename());
    }
    return names;
  }
  fs::path step_file(int64_t step, const std::string& name) { return store().step_path(step) / name; }

  TempFolder folder_;
  FakeRun run_;
  std::vector<std::string> warnings_;
};

TEST_F(TrainingCheckpointTest, LoadsWhatWasSaved) {
  const CheckpointStore checkpoints = store();
  EXPECT_TRUE(checkpoints.list().empty());
  EXPECT_FALSE(checkpoints.latest());
  EXPECT_FALSE(checkpoints.latest_good());
  const SaveReport report = save(checkpoints, 20);
  uint64_t on_disk = 0;
  for (const auto& entry : fs::directory_iterator(report.path)) on_disk += entry.file_size();
  EXPECT_EQ(report.bytes, on_disk);
  save(checkpoints, 40);
  EXPECT_EQ(steps(checkpoints), (std::vector<int64_t>{20, 40}));
  EXPECT_EQ(read_bytes(folder_ / "checkpoints/latest"), "step_40\n");
  EXPECT_EQ(checkpoints.latest()->step, 40);
  for (int64_t step : {20, 40}) {
    run_.clear();
    const json state = checkpoints.load(step, run_.groups());
    EXPECT_TRUE(run_.is_step(step));
    EXPECT_EQ(state["data"]["position"], step * 7);
    const VerifyResult verified = checkpoints.verify(step);
    EXPECT_TRUE(verified.ok()) << verified.problems.front();
    EXPECT_GE(verified.files, 4);
  }
  EXPECT_TRUE(warnings_.empty());
  EXPECT_TRUE(hidden().empty());
}

TEST_F(TrainingCheckpointTest, APartOfTheGroupsCanBeLoaded) {
  save(store(), 1);
  run_.clear();
  const std::vector<TensorGroup> model = {run_.groups()[0]};
  store().load(1, model);
  EXPECT_EQ(model[0].tensors[0].view.f32()[1], 1001.0f);
  EXPECT_EQ(run_.groups()[1].tensors[0].view.f32()[0], -1.0f);
}

TEST_F(TrainingCheckpointTest, SavingAStepAgainReplacesIt) {
  const CheckpointStore checkpoints = store();
  save(checkpoints, 5);
  save(checkpoints, 10);
  run_.set_step(77);
  checkpoints.save(5, run_.groups(), {{"step", 5}});  // a run rewound to before step 5 comes by again
  EXPECT_EQ(steps(checkpoints), (std::vector<int64_t>{10, 5}));
  EXPECT_EQ(checkpoints.latest_good()->step, 5);  // the last one saved, not the highest
  run_.clear();
  checkpoints.load(5, run_.groups());
  EXPECT_TRUE(run_.is_step(77));
  EXPECT_TRUE(hidden().empty());
}

TEST_F(TrainingCheckpointTest, RefusesTensorsThatDisagree) {
  save(store(), 1);
  auto& tensors = run_.groups()[0].tensors;
  const auto refused = [&](const std::string& what) {
    run_.clear();
    expect_error([&] { store().load(1, run_.groups()); }, what);
    for (const auto& tensor : tensors) {
      EXPECT_EQ(static_cast<const float*>(tensor.view.data)[0], -1.0f) << "something was loaded";
    }
  };
  const auto good = tensors;
  tensors[1].view = TensorView(good[1].view.data, DType::kF32, {2, 2});
  refused("tensor 'b.bias' is [4] in the checkpoint, [2, 2] in the model");
  tensors = good;
  tensors[1].view.dtype = DType::kI32;
  refused("tensor 'b.bias' is F32 in the checkpoint, I32 in the model");
  tensors = good;
  tensors[1].name = "c";
  refused("the checkpoint has no tensor 'c' [4]");
  tensors = good;
  tensors.pop_back();
  refused("the checkpoint has a tensor 'b.bias' [4], for which");
  tensors = good;
  run_.groups()[1].name = "momentum";
  refused("holds no 'momentum' tensors");
  expect_error([&] { store().load(2, run_.groups()); }, "step_2/state.json: cannot open");
}

TEST_F(TrainingCheckpointTest, EveryFlippedBitIsFound) {
  save(store(), 3);
  for (const auto& entry : fs::directory_iterator(store().step_path(3))) {
    const std::string good = read_bytes(entry.path());
    const bool manifest = entry.path().filename() == "checksums.json";
    for (size_t at = 0; at < good.size(); at += 1 + good.size() / 23) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 0x04);
      if (manifest && std::isspace(static_cast<unsigned char>(good[at])))
        continue;  // '\n' or ' ' may stay valid JSON
      write_bytes(entry.path(), bad);
      EXPECT_FALSE(store().verify(3).ok()) << entry.path() << " byte " << at;
    }
    write_bytes(entry.path(), good);
  }
  EXPECT_TRUE(store().verify(3).ok());
}

TEST_F(TrainingCheckpointTest, VerifyNamesWhatIsWrong) {
  save(store(), 3);
  const auto expect_problem = [&](const std::string& what) {
    const auto problems = store().verify(3).problems;
    ASSERT_FALSE(problems.empty()) << what;
    EXPECT_NE(problems.front().find(what), std::string::npos) << problems.front();
  };
  const fs::path shard = step_file(3, "exp_avg.safetensors");
  const std::string good = read_bytes(shard);
  write_bytes(shard, good.substr(0, good.size() - 1));
  expect_problem("bytes, " + std::to_string(good.size()) + " were written");
  fs::remove(shard);
  expect_problem("exp_avg.safetensors");
  write_bytes(folder_ / "aside", good);
  fs::create_symlink(folder_ / "aside", shard);
  expect_problem("is a link that leads out of the folder");
  fs::remove(shard);
  write_bytes(shard, good);
  fs::rename(step_file(3, "checksums.json"), folder_ / "aside");
  expect_problem("checksums.json: cannot open");
  fs::rename(folder_ / "aside", step_file(3, "checksums.json"));
  replace_text(step_file(3, "checksums.json"), "\"state.json\"", "\"../state.json\"");
  expect_problem("is not the name of a file in the same folder");
}

TEST_F(TrainingCheckpointTest, LatestGoodPassesOverDamagedOnes) {
  const CheckpointStore checkpoints = store();
  for (int64_t step : {1, 2, 3}) save(checkpoints, step);
  std::string bytes = read_bytes(step_file(3, "exp_avg.safetensors"));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(step_file(3, "exp_avg.safetensors"), bytes);
  fs::resize_file(step_file(2, "exp_avg.safetensors"), 100);
  EXPECT_EQ(checkpoints.latest_good()->step, 1);
  ASSERT_EQ(warnings_.size(), 2u);
  EXPECT_NE(warnings_[0].find("step_3 is damaged and passed over"), std::string::npos) << warnings_[0];
  EXPECT_NE(warnings_[1].find("step_2 is damaged and passed over"), std::string::npos) << warnings_[1];
  EXPECT_EQ(steps(checkpoints), (std::vector<int64_t>{1, 3}));  // 2 is not complete
  // What is made next is newer than all that was passed over, which then is not told again.
  save(checkpoints, 2);
  warnings_.clear();
  EXPECT_EQ(checkpoints.latest_good()->step, 2);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(TrainingCheckpointTest, EveryKindOfDamageIsNamed) {
  const CheckpointStore checkpoints = store();
  const fs::path newest = checkpoints.step_path(2);
  const std::vector<std::pair<std::string, std::function<void()>>> cases = {
      {"bytes, ", [&] { fs::resize_file(newest / "exp_avg.safetensors", 100); }},
      {"'exp_avg.safetensors' is missing", [&] { fs::remove(newest / "exp_avg.safetensors"); }},
      {"checksums.json: ", [&] { fs::remove(newest / "checksums.json"); }},
      {"state.json: ", [&] { fs::remove(newest / "state.json"); }},
      {"a link that leads out",
       [&] {
         fs::rename(newest / "exp_avg.safetensors", folder_ / "aside");
         fs::create_symlink(folder_ / "aside", newest / "exp_avg.safetensors");
       }},
      {"it holds step 2; rename it back to step_2", [&] { fs::rename(newest, checkpoints.step_path(3)); }},
  };
  for (const auto& [what, damage] : cases) {
    SCOPED_TRACE(what);
    fs::remove_all(folder_ / "checkpoints");
    save(checkpoints, 1);
    save(checkpoints, 2);
    damage();
    fs::remove(folder_ / "checkpoints/latest");
    warnings_.clear();
    EXPECT_EQ(checkpoints.latest_good()->step, 1);
    ASSERT_EQ(warnings_.size(), 1u);
    EXPECT_NE(warnings_[0].find(what), std::string::npos) << warnings_[0];
  }
}

TEST_F(TrainingCheckpointTest, ForeignFilesAreNothingToACheckpoint) {
  const CheckpointStore checkpoints = store();
  save(checkpoints, 1);
  save(checkpoints, 2);
  for (const char* name : {".DS_Store", "notes.txt"}) write_bytes(step_file(2, name), "x");
  EXPECT_EQ(checkpoints.latest_good()->step, 2);
  EXPECT_EQ(steps(checkpoints), (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(checkpoints.verify(2).ok());
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(TrainingCheckpointTest, WithoutOneThatCanBeUsedThereIsNoStart) {
  const CheckpointStore checkpoints = store();
  EXPECT_TRUE(checkpoints.empty());
  for (int64_t step : {1, 2, 3}) save(checkpoints, step);
  fs::resize_file(step_file(1, "exp_avg.safetensors"), 100);
  fs::remove(step_file(2, "state.json"));
  std::string bytes = read_bytes(step_file(3, "exp_avg.safetensors"));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(step_file(3, "exp_avg.safetensors"), bytes);
  fs::remove(folder_ / "checkpoints/latest");
  expect_error([&] { checkpoints.latest_good(); }, "none of its 3 checkpoints can be used");
  ASSERT_EQ(warnings_.size(), 3u);
  for (const char* name : {"step_1 ", "step_2 ", "step_3 "}) {
    EXPECT_TRUE(std::any_of(warnings_.begin(), warnings_.end(), [&](const std::string& line) {
      return line.find(name) != std::string::npos;
    })) << name;
  }
  EXPECT_FALSE(checkpoints.empty());
  expect_error([&] { find_checkpoint(folder_.path()); }, "none of its 3 checkpoints can be used");
}

TEST_F(TrainingCheckpointTest, ANewerFormatIsRefusedAndNotPassedOver) {
  const CheckpointStore checkpoints = store();
  save(checkpoints, 1);
  save(checkpoints, 2);
  replace_text(step_file(2, "state.json"), "\"format_version\": 1", "\"format_version\": 99");
  expect_error([&] { checkpoints.latest_good(); },
               "step_2/state.json: format version 99 was written by biomoe");
}

TEST_F(TrainingCheckpointTest, WhereNothingCanBeSavedIsKnownBefore) {
  store().require_writable();
  EXPECT_FALSE(fs::exists(folder_ / "checkpoints"));
  write_bytes(folder_ / "checkpoints", "x");
  expect_error([&] { store().require_writable(); }, "checkpoints is not a folder");
  expect_error([&] { CheckpointStore(folder_ / "checkpoints/below/it").require_writable(); },
               "checkpoints is not a folder");
  fs::remove(folder_ / "checkpoints");
  fs::create_symlink(folder_ / "nowhere", folder_ / "checkpoints");
  expect_error([&] { store().require_writable(); }, "checkpoints cannot be saved there");
  fs::remove(folder_ / "checkpoints");
  fs::create_directories(folder_ / "checkpoints/latest");
  expect_error([&] { store().require_writable(); }, "latest: is in the way");
  fs::remove_all(folder_ / "checkpoints");
  fs::create_directory(folder_ / "checkpoints");
  fs::permissions(folder_ / "checkpoints", fs::perms::owner_read | fs::perms::owner_exec);
  if (geteuid() != 0) expect_error([&] { store().require_writable(); }, "Permission denied");
  fs::permissions(folder_ / "checkpoints", fs::perms::owner_all);
}

TEST_F(TrainingCheckpointTest, ThePointerMayBeBehindOrBroken) {
  const CheckpointStore checkpoints = store();
  save(checkpoints, 1);
  save(checkpoints, 2);
  write_bytes(folder_ / "checkpoints/latest", "step_1\n");  // a crash between the rename and the pointer
  EXPECT_EQ(checkpoints.latest_good()->step, 2);
  EXPECT_TRUE(warnings_.empty());
  for (const char* text : {"", "step_", "step_9\n", "../step_1", "step_01\n", "step_99999999999999999999"}) {
    write_bytes(folder_ / "checkpoints/latest", text);
    EXPECT_FALSE(checkpoints.latest()) << text;
    EXPECT_EQ(checkpoints.latest_good()->step, 2);
  }
  EXPECT_EQ(warnings_.size(), 6u);
  fs::remove(folder_ / "checkpoints/latest");
  EXPECT_EQ(checkpoints.latest_good()->step, 2);
  fs::create_directory(folder_ / "checkpoints/latest");
  EXPECT_FALSE(checkpoints.latest());
  EXPECT_EQ(checkpoints.latest_good()->step, 2);
}

TEST_F(TrainingCheckpointTest, KeepsTheNewestFew) {
  const CheckpointStore checkpoints = store(2);
  for (int64_t step : {10, 20, 30}) save(checkpoints, step);
  EXPECT_EQ(steps(checkpoints), (std::vector<int64_t>{20, 30}));
  const SaveReport report = save(checkpoints, 5);  // a lower step, but the newest
  ASSERT_EQ(report.pruned.size(), 1u);
  EXPECT_EQ(report.pruned[0].filename(), "step_20");
  EXPECT_EQ(steps(checkpoints), (std::vector<int64_t>{30, 5}));
  EXPECT_TRUE(hidden().empty());
  const CheckpointStore one = store(1);
  save(one, 6);
  EXPECT_EQ(steps(one), (std::vector<int64_t>{6}));
}

TEST_F(TrainingCheckpointTest, PruningLeavesWhatItCannotJudge) {
  const CheckpointStore checkpoints = store(1);
  save(checkpoints, 1);
  fs::remove(step_file(1, "checksums.json"));
  fs::create_directories(folder_ / "checkpoints/step_notes");
  save(checkpoints, 2);
  save(checkpoints, 3);
  EXPECT_TRUE(fs::exists(store().step_path(1)));
  EXPECT_TRUE(fs::exists(folder_ / "checkpoints/step_notes"));
  EXPECT_EQ(steps(checkpoints), (std::vector<int64_t>{3}));
}

TEST_F(TrainingCheckpointTest, RefusesOtherFormats) {
  save(store(), 1);
  const fs::path state = step_file(1, "state.json");
  const std::string good = read_bytes(state);
  const auto refused = [&](const std::string& from, const std::string& to, const std::string& what) {
    write_bytes(state, good);
    replace_text(state, from, to);
    expect_error([&] { store().load(1, run_.groups()); }, what);
  };
  refused("\"format_version\": 1", "\"format_version\": 2", "this program reads version 1");
  refused("\"format_version\": 1", "\"format_version\": \"1\"", "format_version is missing or not a count");
  refused("biomoe-training", "other", "format 'other' is unknown");
  refused("\n  \"step\": 1", "\n  \"step\": -1", "step is missing or not a count");
  refused("\"groups\": [", "\"groups\": [1,", "something that is no name");
  refused("{", "[", "not valid JSON");
  write_bytes(state, "[]");
  expect_error([&] { read_checkpoint_header(store().step_path(1)); },
               "not the state of a training checkpoint");
}

TEST_F(TrainingCheckpointTest, FindsCheckpointsFromTheirRun) {
  save(store(), 1);
  save(store(), 2);
  const fs::path step2 = store().step_path(2);
  EXPECT_EQ(find_checkpoint(folder_.path()), step2);
  EXPECT_EQ(find_checkpoint(folder_ / "checkpoints"), step2);
  EXPECT_EQ(find_checkpoint(store().step_path(1)), store().step_path(1));
  expect_error([&] { find_checkpoint(folder_ / "checkpoints/latest"); },
               "latest: is a file; name the run folder");
  const TempFolder other;
  expect_error([&] { find_checkpoint(other.path()); }, "holds no complete training checkpoint");
  expect_error([&] { find_checkpoint(other / "absent"); }, "holds no complete training checkpoint");
}

TEST_F(TrainingCheckpointTest, ContractsOfTheCallerAreChecked) {
  run_.set_step(1);
  auto groups = run_.groups();
  groups[0].tensors[1].name = "a.weight";
  expect_error([&] { store().save(1, groups, json::object()); }, "given twice", ErrorKind::kFailure);
  groups = run_.groups();
  groups[1].name = "../x";
  expect_error([&] { store().save(1, groups, json::object()); }, "is odd", ErrorKind::kFailure);
  groups = run_.groups();
  groups[0].tensors[0].view = groups[0].tensors[0].view.columns(0, 2);
  expect_error([&] { store().save(1, groups, json::object()); }, "not contiguous", ErrorKind::kFailure);
  expect_error([&] { store().save(-1, run_.groups(), json::object()); }, "step -1", ErrorKind::kFailure);
  expect_error([&] { store().save(1, run_.groups(), {{"text", "\xff"}}); }, "not UTF-8", ErrorKind::kFailure);
  EXPECT_TRUE(hidden().empty());
}

TEST(TrainingState, GoesThroughJson) {
  TrainingState state;
  state.step = 12;
  state.optimizer_step = 11;
  state.seed = ~uint64_t{0};
  state.world_size = 4;
  state.dp = 2;
  state.ep = 2;
  state.data = {{"sample", 99}};
  state.model = {{"hidden_size", 8}};
  state.config_yaml = "a: 1\n";
  state.extra = {{"best", 0.5}};
  const json written = json::parse(state.to_json().dump());
  const TrainingState read = TrainingState::from_json(written, "state.json");
  EXPECT_EQ(read.to_json(), state.to_json());
  EXPECT_EQ(read.seed, ~uint64_t{0});
  for (const auto& [key, value] : written.items()) {
    json without = written;
    without.erase(key);
    expect_error([&] { TrainingState::from_json(without, "state.json"); }, key);
    json damaged = written;
    damaged[key] = {1, "x"};  // a list: no member is one
    expect_error([&] { TrainingState::from_json(damaged, "state.json"); }, key);
  }
}

TEST(FirstDifference, NamesTheKeyAndBothValues) {
  const json a = {{"hidden_size", 256}, {"rope", {{"theta", 1e6}}}, {"list", {1, 2}}, {"window", nullptr}};
  EXPECT_EQ(first_difference(a, a), "");
  json b = a;
  b["hidden_size"] = 256.0;  // equal by value
  EXPECT_EQ(first_difference(a, b), "");
  b["hidden_size"] = 512;
  EXPECT_EQ(first_difference(a, b), "hidden_size: the checkpoint has 256, this run has 512");
  b = a;
  b["rope"]["theta"] = 1e4;
  EXPECT_EQ(first_difference(a, b), "rope.theta: the checkpoint has 1000000.0, this run has 10000.0");
  b = a;
  b["list"][1] = 3;
  EXPECT_EQ(first_difference(a, b), "list[1]: the checkpoint has 2, this run has 3");
  b = a;
  b.erase("window");
  EXPECT_EQ(first_difference(a, b), "window: the checkpoint has null, this run has nothing");
  EXPECT_EQ(first_difference(b, a), "window: the checkpoint has nothing, this run has null");
  b = a;
  b["list"] = {1};
  EXPECT_EQ(first_difference(a, b), "list: the checkpoint has [1,2], this run has [1]");
}

}  // namespace
}  // namespace biomoe
