// Saves that are killed, meet a full disk, or run behind the trainer's back.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "biomoe/checkpoint/async_saver.h"
#include "biomoe/checkpoint/hf_export.h"
#include "biomoe/checkpoint/staging_folder.h"
#include "biomoe/checkpoint/training_checkpoint.h"
#include "checkpoint_test_util.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::expect_error;
using testing::FakeRun;
using testing::TempFolder;
using testing::write_bytes;

constexpr int64_t kRows = 20'000;  // 320 kB: a save takes long enough to be hit

std::vector<std::string> hidden_names(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string()[0] == '.') names.push_back(entry.path().filename());
  }
  return names;
}

SaveReport save_step(const CheckpointStore& store, FakeRun& run, int64_t step) {
  run.set_step(step);
  return store.save(step, run.groups(), {{"step", step}});
}

// Runs `body` in a child process; it never returns there.
template <typename Body>
pid_t in_child(Body body) {
  const pid_t child = fork();
  if (child != 0) return child;
  try {
    body();
  } catch (...) {
    _exit(3);
  }
  _exit(0);
}

TEST(CheckpointCrash, KilledAtTenMomentsTheNewestGoodOneLoads) {
  const TempFolder folder;
  const CheckpointStore store(folder.path(), {.max_checkpoints = 2, .max_shard_bytes = 100'000});
  FakeRun run(kRows);
  int64_t last = 0;
  size_t interrupted = 0;
  for (int round = 0; round < 10; ++round) {
    const pid_t child = in_child([&] {
      FakeRun own(kRows);
      for (int64_t step = last + 1;; ++step) save_step(store, own, step);
    });
    ASSERT_GT(child, 0);
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (true) {  // at least one more save is done
      const auto good = store.latest();
      if ((good && good->step > last) || std::chrono::steady_clock::now() > give_up) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const Rng rng(7, RngStream::kTest);
    usleep(static_cast<useconds_t>(rng.uniform(static_cast<uint64_t>(round)) * 40'000));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << WEXITSTATUS(status);
    interrupted += hidden_names(folder.path()).empty() ? 0 : 1;

    const auto good = store.latest_good();
    ASSERT_TRUE(good);
    EXPECT_GT(good->step, last);
    EXPECT_EQ(good->save_index, store.list().back().save_index) << "the newest complete one was not good";
    run.clear();
    EXPECT_EQ(store.load(good->step, run.groups())["step"], good->step);
    EXPECT_TRUE(run.is_step(good->step));
    last = good->step;
  }
  EXPECT_GT(interrupted, 0u) << "no kill fell into a save";
  save_step(store, run, last + 1);
  EXPECT_TRUE(hidden_names(folder.path()).empty());
  EXPECT_EQ(store.list().size(), 2u);
}

// The size limit on files ends a child with a signal at an exact byte of a file.
TEST(CheckpointCrash, KilledInsideAFileTheFormerOneStays) {
  const TempFolder folder;
  const CheckpointStore store(folder.path());
  FakeRun run(kRows);
  save_step(store, run, 1);
  for (rlim_t limit : {rlim_t{0}, rlim_t{1}, rlim_t{300}, rlim_t{200'000}}) {
    const pid_t child = in_child([&] {
      signal(SIGXFSZ, SIG_DFL);
      const rlimit none{0, 0}, bytes{limit, RLIM_INFINITY};
      setrlimit(RLIMIT_CORE, &none);
      setrlimit(RLIMIT_FSIZE, &bytes);
      save_step(store, run, 2);
    });
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ);
    EXPECT_FALSE(hidden_names(folder.path()).empty());
    EXPECT_EQ(store.latest_good()->step, 1);
  }
  save_step(store, run, 2);
  EXPECT_TRUE(hidden_names(folder.path()).empty());
  EXPECT_EQ(store.latest_good()->step, 2);
}

TEST(CheckpointCrash, LeftoversOfTheLivingStay) {
  const TempFolder folder;
  const CheckpointStore store(folder.path());
  FakeRun run;
  StagingFolder other(folder / "step_9");  // as another process that is saving holds it
  write_bytes(other.path() / "data", "half");
  fs::create_directory(folder / ".step_8.partial-1-0");
  write_bytes(folder / ".step_8.partial-1-0/data", "dead");
  fs::create_directory(folder / ".step_7.deleted-1-0");
  fs::create_directory(folder / ".step_6.partial-mine");
  save_step(store, run, 1);
  EXPECT_EQ(hidden_names(folder.path()).size(), 2u);
  EXPECT_TRUE(fs::exists(other.path() / "data"));
  EXPECT_TRUE(fs::exists(folder / ".step_6.partial-mine"));
  other.commit();
  EXPECT_TRUE(fs::exists(folder / "step_9/data"));
}

TEST(StagingFolderTest, ReplacesAFolderThatStandsThere) {
  const TempFolder folder;
  fs::create_directory(folder / "x");
  write_bytes(folder / "x/old", "1");
  {
    StagingFolder staging(folder / "x");
    write_bytes(staging.path() / "new", "2");
    EXPECT_TRUE(fs::exists(folder / "x/old"));
    staging.commit();
  }
  EXPECT_TRUE(fs::exists(folder / "x/new"));
  EXPECT_FALSE(fs::exists(folder / "x/old"));
  EXPECT_TRUE(hidden_names(folder.path()).empty());
}

TEST(StagingFolderTest, WithoutACommitNothingStays) {
  const TempFolder folder;
  { StagingFolder staging(folder / "x"); }
  EXPECT_TRUE(fs::is_empty(folder.path()));
  expect_error([&] { StagingFolder staging(folder / "absent/x"); }, "cannot create the folder",
               ErrorKind::kFailure);
}

// Files beyond `bytes` cannot be written while this lives, whoever runs the test.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    former_handler_ = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &former_);
    const rlimit limit{bytes, former_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &former_);
    signal(SIGXFSZ, former_handler_);
  }

 private:
  rlimit former_{};
  void (*former_handler_)(int) = SIG_DFL;
};

TEST(CheckpointDisk, AWriteThatFailsLeavesTheFormerOne) {
  const TempFolder folder;
  const CheckpointStore store(folder.path());
  FakeRun run(kRows);
  save_step(store, run, 1);
  {
    const FileSizeLimit limit(100'000);
    const std::string message = error_of([&] { save_step(store, run, 2); }, ErrorKind::kFailure);
    EXPECT_NE(message.find("step_2 was not saved, the ones before it are untouched"), std::string::npos)
        << message;
    EXPECT_NE(message.find("model.safetensors: cannot write: File too large"), std::string::npos) << message;
  }
  EXPECT_TRUE(hidden_names(folder.path()).empty());
  EXPECT_FALSE(fs::exists(folder / "step_2"));
  EXPECT_EQ(store.latest_good()->step, 1);
  save_step(store, run, 2);
  EXPECT_EQ(store.latest_good()->step, 2);
}

TEST(CheckpointDisk, AFullDiskIsOneLine) {
  const TempFolder folder;
  if (mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=600k") != 0) {
    GTEST_SKIP() << "mounting a small file system needs privileges";
  }
  {
    const CheckpointStore store(folder / "checkpoints");
    FakeRun run(kRows);
    save_step(store, run, 1);
    const std::string message = error_of([&] { save_step(store, run, 2); }, ErrorKind::kFailure);
    EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
    EXPECT_TRUE(hidden_names(folder / "checkpoints").empty());
    EXPECT_EQ(store.latest_good()->step, 1);
    EXPECT_EQ(store.latest()->step, 1);
  }
  EXPECT_EQ(umount(folder.path().c_str()), 0);
}

TEST(CheckpointDisk, AnExportThatFailsLeavesNothing) {
  const TempFolder folder;
  const ParameterList parameters(testing::small_model());
  const std::vector<float> arena(static_cast<size_t>(parameters.arena_elements()));
  const auto run = [&] {
    export_hf(folder / "out", testing::small_model(), parameters, arena.data(), {.max_shard_bytes = 1000});
  };
  {
    const FileSizeLimit limit(1000);
    expect_error(run, "cannot write: File too large", ErrorKind::kFailure);
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
  run();
  EXPECT_TRUE(fs::exists(folder / "out/model.safetensors.index.json"));
}

TEST(CheckpointDisk, AFolderThatCannotBeMadeIsOneLine) {
  const TempFolder folder;
  write_bytes(folder / "file", "x");
  FakeRun run;
  const CheckpointStore store(folder / "file/checkpoints");
  expect_error([&] { save_step(store, run, 1); }, "was not saved", ErrorKind::kFailure);
}

TEST(AsyncSaverTest, SavesWhatStoodThereWhenAsked) {
  const TempFolder folder;
  FakeRun run(kRows);
  const CheckpointStore store(folder.path());
  {
    AsyncSaver saver(store, run.groups());
    EXPECT_GE(AsyncSaver::staging_bytes(run.groups()), total_bytes(run.groups()));
    saver.wait();  // nothing to wait for
    for (int64_t step = 1; step <= 4; ++step) {
      run.set_step(step);
      saver.save(step, {{"step", step}});
      run.clear();  // the step goes on at once
    }
    saver.wait();
    EXPECT_EQ(saver.last_report()->step, 4);
    run.set_step(5);
    saver.save(5, {{"step", 5}});
    run.clear();
  }  // waits
  for (int64_t step = 1; step <= 5; ++step) {
    run.clear();
    EXPECT_EQ(store.load(step, run.groups())["step"], step);
    EXPECT_TRUE(run.is_step(step));
    EXPECT_TRUE(store.verify(step).ok());
  }
}

TEST(AsyncSaverTest, ErrorsSurfaceAtTheNextCall) {
  const TempFolder folder;
  FakeRun run(kRows);
  std::vector<std::string> warnings;
  const CheckpointStore store(folder.path(),
                              {.warn = [&](const std::string& line) { warnings.push_back(line); }});
  {
    const FileSizeLimit limit(100'000);  // outlives the saver, which waits for its last save
    AsyncSaver saver(store, run.groups());
    saver.save(1, {{"step", 1}});
    expect_error([&] { saver.save(2, {{"step", 2}}); }, "step_1 was not saved", ErrorKind::kFailure);
    saver.wait();  // told once
    saver.save(3, {{"step", 3}});
    expect_error([&] { saver.wait(); }, "step_3 was not saved", ErrorKind::kFailure);
    EXPECT_TRUE(warnings.empty());
    saver.save(4, {{"step", 4}});
    EXPECT_FALSE(saver.last_report());
  }
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("step_4 was not saved"), std::string::npos);
  EXPECT_TRUE(store.list().empty());
}

}  // namespace
}  // namespace biomoe
