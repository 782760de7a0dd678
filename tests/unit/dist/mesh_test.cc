#include "biomoe/dist/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "biomoe/core/error.h"
#include "tests/ranks.h"

namespace biomoe {
namespace {

using ::testing::HasSubstr;

TEST(Mesh, RanksCountEpFastest) {
  test::run_ranks(6, [](std::unique_ptr<Comm> world) {
    const int rank = world->rank();
    const Mesh mesh(std::move(world), {.dp = 3, .ep = 2});
    EXPECT_EQ(mesh.rank(), rank);
    EXPECT_EQ(mesh.ep().size(), 2);
    EXPECT_EQ(mesh.ep().rank(), rank % 2);
    EXPECT_EQ(mesh.dp().size(), 3);
    EXPECT_EQ(mesh.dp().rank(), rank / 2);
    EXPECT_EQ(mesh.place().ep_rank, rank % 2);
    EXPECT_EQ(mesh.place().dp_rank, rank / 2);
    EXPECT_EQ(mesh.place().rank(), rank);
  });
}

TEST(Mesh, SizesComeFromTheWorld) {
  EXPECT_EQ(resolve_mesh(0, 1, 1, 8).dp, 1);
  EXPECT_EQ(resolve_mesh(0, 2, 8, 8).dp, 4);
  EXPECT_EQ(resolve_mesh(2, 2, 4, 8).dp, 2);
}

TEST(Mesh, SizesThatDoNotFitAreRefusedByTheirKeys) {
  const struct {
    int64_t dp, ep, world, experts;
    std::vector<const char*> parts;
  } rows[] = {{0, 3, 3, 8, {"num_local_experts=8", "ep_size=3"}},
              {0, 2, 1, 8, {"ep_size=2", "1 are here", "a multiple of 2"}},
              {0, 2, 3, 8, {"ep_size=2", "3 are here"}},
              {2, 2, 8, 8, {"dp_size=2", "for 4 ranks", "8 are here"}},
              {INT64_MAX, 2, 2, 8, {"dp_size"}},
              {-1, 1, 1, 8, {"dp_size=-1"}},
              {0, 0, 1, 8, {"ep_size=0"}}};
  for (const auto& row : rows) {
    try {
      resolve_mesh(row.dp, row.ep, row.world, row.experts);
      ADD_FAILURE() << row.dp << " x " << row.ep << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUser);
      for (const char* part : row.parts) EXPECT_THAT(error.what(), HasSubstr(part));
    }
  }
}

}  // namespace
}  // namespace biomoe
