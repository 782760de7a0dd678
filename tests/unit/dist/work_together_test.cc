#include "biomoe/dist/work_together.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "biomoe/core/error.h"
#include "tests/ranks.h"

namespace biomoe {
namespace {

using test::run_ranks;
using ::testing::HasSubstr;

constexpr std::chrono::milliseconds kLong{1500};
constexpr double kTimeout = 0.5;

TEST(WorkTogether, TakesAsLongAsTheSlowestRankBeyondTheTimeout) {
  std::atomic<int> done{0};
  run_ranks(
      3,
      [&](std::unique_ptr<Comm> world) {
        work_together(*world, "long work", [&] {
          if (world->rank() == 1) std::this_thread::sleep_for(kLong);
          ++done;
        });
        EXPECT_EQ(done, 3) << "rank " << world->rank() << " went on before all were done";
        world->barrier("what comes after");
      },
      kTimeout);
}

TEST(WorkTogether, ARankThatStopsMeanwhileIsNamed) {
  std::atomic<int> named{0};
  run_ranks(
      3,
      [&](std::unique_ptr<Comm> world) {
        if (world->rank() == 2) return;
        try {
          work_together(*world, "long work", [&] { std::this_thread::sleep_for(kLong); });
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), HasSubstr("long work did not complete within 0.5 s: waiting for rank"));
          ++named;
        }
      },
      kTimeout);
  EXPECT_EQ(named, 2);
}

TEST(WorkTogether, AnErrorOfOneRankIsThatOfAll) {
  for (const ErrorKind kind : {ErrorKind::kUser, ErrorKind::kFailure}) {
    std::atomic<int> told{0};
    run_ranks(3, [&](std::unique_ptr<Comm> world) {
      try {
        work_together(*world, "work", [&] {
          if (world->rank() == 1) throw Error(kind, "a.fa: cannot be read");
        });
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), kind);
        EXPECT_EQ(std::string(error.what()),
                  world->rank() == 1 ? "a.fa: cannot be read" : "rank 1: a.fa: cannot be read");
        ++told;
      }
    });
    EXPECT_EQ(told, 3);
  }
}

TEST(WorkTogether, OtherExceptionsGoOnAsTheyAre) {
  std::atomic<int> own{0}, others{0};
  run_ranks(2, [&](std::unique_ptr<Comm> world) {
    try {
      work_together(*world, "work", [&] {
        if (world->rank() == 0) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      ++own;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 0: "));
      ++others;
    }
  });
  EXPECT_EQ(own, 1);
  EXPECT_EQ(others, 1);
}

}  // namespace
}  // namespace biomoe
