#include "biomoe/core/arena.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

TEST(Arena, MemoryIsAlignedZeroAndSeparate) {
  Arena arena(1000);
  EXPECT_EQ(arena.capacity() % kArenaAlignment, 0u);
  auto* first = static_cast<uint8_t*>(arena.allocate(1));
  auto* second = static_cast<uint8_t*>(arena.allocate(100));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % kArenaAlignment, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(second) % kArenaAlignment, 0u);
  EXPECT_GE(second, first + 1);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(second[i], 0);
  EXPECT_EQ(arena.used(), 2 * kArenaAlignment);
}

TEST(Arena, ExceedingThePlanNamesItAndChangesNothing) {
  Arena arena(256, "the workspace");
  arena.allocate(128);
  try {
    arena.allocate(129);
    FAIL() << "more than the capacity was handed out";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("the workspace is planned at 256 bytes, 128 are in use and 256"),
              std::string::npos)
        << message;
  }
  EXPECT_EQ(arena.used(), 128u);
  EXPECT_NO_THROW(arena.allocate(128));
}

TEST(Arena, MemoryTheSystemHasNotIsRefused) {
  EXPECT_THROW(Arena(size_t{1} << 62), Error);
  Arena empty;
  EXPECT_THROW(empty.allocate(1), Error);
  EXPECT_NO_THROW(empty.poison_free());
}

TEST(Arena, ScopesGiveBackAndThePeakStays) {
  Arena arena(1024);
  arena.allocate(128);
  {
    const ArenaScope scope(arena);
    arena.allocate(512);
    EXPECT_EQ(arena.used(), 640u);
  }
  EXPECT_EQ(arena.used(), 128u);
  EXPECT_EQ(arena.peak(), 640u);
  EXPECT_THROW(arena.release(256), Error) << "released out of order";
}

TEST(Arena, PoisonReadsAsNanAndSparesWhatIsInUse) {
  Arena arena(4096);
  TensorView kept = arena.tensor(DType::kF32, {8});
  for (int i = 0; i < 8; ++i) kept.f32()[i] = 1.5f;
  arena.poison_free();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(kept.f32()[i], 1.5f);
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kI32}) {
    const ArenaScope scope(arena);
    const TensorView view = arena.tensor(dtype, {3});
    switch (dtype) {
      case DType::kF32:
        EXPECT_TRUE(std::isnan(view.f32()[2]));
        break;
      case DType::kF64:
        EXPECT_TRUE(std::isnan(view.f64()[2]));
        break;
      case DType::kI32:
        EXPECT_EQ(view.i32()[2], -1);
        break;
      default: {
        const uint16_t bits = static_cast<const uint16_t*>(view.data)[2];
        EXPECT_TRUE(std::isnan(dtype == DType::kBF16 ? float_from_bf16(bits) : float_from_f16(bits)));
      }
    }
  }
}

TEST(Arena, MovingTakesTheMemoryAlong) {
  Arena first(512);
  auto* memory = static_cast<uint8_t*>(first.allocate(100));
  memory[0] = 7;
  Arena second(std::move(first));
  EXPECT_EQ(second.used(), 128u);
  EXPECT_EQ(memory[0], 7);
  Arena third;
  third = std::move(second);
  EXPECT_EQ(third.capacity(), 512u);
  EXPECT_EQ(memory[0], 7);
}

}  // namespace
}  // namespace biomoe
