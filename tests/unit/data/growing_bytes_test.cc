#include "biomoe/data/growing_bytes.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace biomoe {
namespace {

std::string_view text_of(const GrowingBytes& bytes) {
  return {bytes.data(), bytes.size()};
}

TEST(GrowingBytes, HoldsWhatWasAppendedAcrossGrowth) {
  GrowingBytes bytes;
  std::string expected;
  for (int i = 0; i < 3000; ++i) {
    const std::string part(static_cast<size_t>(i % 700), static_cast<char>('a' + i % 26));
    bytes.append(part);
    expected += part;
  }
  EXPECT_EQ(text_of(bytes), expected);
  bytes.append({});
  EXPECT_EQ(bytes.size(), expected.size());
}

TEST(GrowingBytes, IsClearedFreedAndMoved) {
  GrowingBytes bytes;
  bytes.append("abc");
  const char* before = bytes.data();
  bytes.clear();
  EXPECT_EQ(bytes.size(), 0u);
  bytes.append("de");
  EXPECT_EQ(bytes.data(), before);
  GrowingBytes moved = std::move(bytes);
  EXPECT_EQ(text_of(moved), "de");
  moved.free();
  EXPECT_EQ(moved.data(), nullptr);
  moved.append("f");
  EXPECT_EQ(text_of(moved), "f");
}

}  // namespace
}  // namespace biomoe
