// Ranks that are threads and talk over TCP: the same results as over memory, and what goes wrong in start-up.
#include "biomoe/dist/tcp/tcp_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "biomoe/core/error.h"
#include "biomoe/core/rng.h"
#include "biomoe/dist/tcp/socket.h"
#include "tests/ranks.h"

namespace biomoe {
namespace {

using ::testing::HasSubstr;

// A port that was free a moment ago.
int free_port() {
  const tcp::Socket socket = tcp::listen_at(0);
  return tcp::local_port(socket);
}

void run_tcp_ranks(int ranks, const std::function<void(std::unique_ptr<Comm> world)>& body) {
  const int port = free_port();
  test::run_threads(ranks, [&](int rank) {
    body(std::make_unique<GroupComm>(
        tcp::start({.rank = rank, .size = ranks, .host = "localhost", .port = port}, 20)));
  });
}

std::vector<float> values_of(int rank, int64_t count) {
  const Rng rng(4, RngStream::kTest, static_cast<uint32_t>(rank));
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(rng.normal(static_cast<uint64_t>(i))));
  return values;
}

TEST(TcpTransport, SumsAreThoseOfRanksThatShareMemory) {
  for (const int ranks : {2, 3, 5}) {
    // Of one message, and more than a connection takes at once.
    for (const int64_t count : {int64_t{1}, int64_t{1000}, int64_t{2'000'003}}) {
      std::vector<float> want;
      const auto sum = [&](std::unique_ptr<Comm> world, std::vector<float>& values) {
        Context ctx;
        values = values_of(world->rank(), count);
        world->all_reduce(ctx, TensorView(values.data(), DType::kF32, Shape{count}), ReduceOp::kSum,
                          "values");
      };
      test::run_ranks(ranks, [&](std::unique_ptr<Comm> world) {
        std::vector<float> values;
        const bool first = world->rank() == 0;
        sum(std::move(world), values);
        if (first) want = values;
      });
      run_tcp_ranks(ranks, [&](std::unique_ptr<Comm> world) {
        std::vector<float> values;
        sum(std::move(world), values);
        EXPECT_EQ(values, want) << ranks << " ranks, " << count;
      });
    }
  }
}

TEST(TcpTransport, SplitsAndTextsWork) {
  run_tcp_ranks(4, [](std::unique_ptr<Comm> world) {
    const auto half = world->split(world->rank() % 2, world->rank());
    EXPECT_EQ(all_reduce_value(*half, int64_t{world->rank()}, ReduceOp::kSum, "ranks"),
              world->rank() % 2 == 0 ? 2 : 4);
    const auto texts =
        all_gather_text(*world, std::string(static_cast<size_t>(world->rank()) * 1000, 'x'), "texts");
    for (size_t rank = 0; rank < 4; ++rank) EXPECT_EQ(texts[rank].size(), rank * 1000);
  });
}

// Anybody may connect to a port; only ranks of the run are let in.
TEST(TcpTransport, StrangersAreSentAway) {
  const int port = free_port();
  test::run_threads(3, [&](int rank) {
    if (rank == 2) {
      const double deadline = 1e18;
      const tcp::Socket stranger = tcp::connect_before({"localhost", port}, deadline);
      const std::string hello(64, '?');
      tcp::send_before(stranger, {hello.data(), hello.size()}, deadline);
      return;
    }
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the stranger is first
    GroupComm world(tcp::start({.rank = rank, .size = 2, .host = "127.0.0.1", .port = port}, 20));
    EXPECT_EQ(all_reduce_value(world, int64_t{1}, ReduceOp::kSum, "ones"), 2);
  });
}

TEST(TcpTransport, APortInUseIsTheUsersToChange) {
  const tcp::Socket taken = tcp::listen_at(0);
  const int port = tcp::local_port(taken);
  try {
    tcp::start({.rank = 0, .size = 2, .host = "localhost", .port = port}, 5);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_THAT(error.what(), HasSubstr(std::to_string(port)));
    EXPECT_THAT(error.what(), HasSubstr("MASTER_PORT"));
  }
}

TEST(TcpTransport, ARankThatDoesNotComeIsNamed) {
  try {
    tcp::start({.rank = 0, .size = 3, .host = "localhost", .port = free_port()}, 0.3);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("waiting for rank 1, 2"));
  }
}

}  // namespace
}  // namespace biomoe
