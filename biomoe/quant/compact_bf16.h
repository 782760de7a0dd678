// BF16 in 13 bits: what is kept of gate and up for backward where the experts' products take codes. Eight
// neighbours share their largest exponent; each has its sign, its seven bits of mantissa and how far it lies
// above 15 binades below that exponent. So what is more than 2^-15 of the largest of its eight comes back bit
// for bit, and what is less as a zero of its sign, where BF16 itself rounds by up to 2^-9 of each. NaN and
// infinity come back too; beside them, what is above 2^113. Of eight below 2^-111 all do.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace biomoe {

// Bytes of a matrix [R, F] of pairs, gate and up, where R is a multiple of 4 and F of 8. Three planes follow
// each other, each by rows of groups of eight features of a row (or the last, of four rows):
//   low      [R, F / 8, 2, 8]         the low 8 bits of the gates and of the ups
//   high     [R, F / 8, 2, 4]         their high 4 bits, as CompactBf16::high
//   exponent [R / 4, F / 8, 2, 4]     of the gates of four rows, and of the ups
struct CompactLayout {
  static constexpr int64_t kGroup = 8, kGroupRows = 4;
  int64_t rows = 0, features = 0;

  static constexpr int64_t row_bytes(int64_t features) { return features * 2 * 13 / 8; }
  constexpr int64_t groups() const { return features / kGroup; }
  constexpr int64_t high_plane() const { return rows * features * 2; }
  constexpr int64_t exponent_plane() const { return high_plane() + rows * features; }
  constexpr int64_t bytes() const { return rows * row_bytes(features); }
};

// Eight neighbours.
struct CompactBf16 {
  std::array<uint8_t, 8> low{};
  uint32_t high = 0;     // of element 2 i at bit 4 i, of element 2 i + 1 at bit 16 + 4 i
  uint8_t exponent = 0;  // biased, as BF16's

  // Magnitudes are counted from here.
  static constexpr uint32_t base(uint32_t exponent) { return (std::max(exponent, 15u) - 15u) << 7; }
  static constexpr int high_shift(size_t element) {
    return static_cast<int>(4 * (element / 2) + 16 * (element % 2));
  }

  // `bits`: of eight BF16 numbers.
  static constexpr CompactBf16 of(const std::array<uint16_t, 8>& bits) {
    uint32_t largest = 0;
    for (const uint16_t x : bits) largest = std::max(largest, x & 0x7fffu);
    CompactBf16 to;
    to.exponent = static_cast<uint8_t>(largest >> 7);
    const uint32_t from = base(to.exponent);
    for (size_t i = 0; i < bits.size(); ++i) {
      const uint32_t code = std::max(bits[i] & 0x7fffu, from) - from;  // of 11 bits
      to.low[i] = static_cast<uint8_t>(code);
      to.high |= (code >> 8 | (bits[i] & 0x8000u) >> 12) << high_shift(i);
    }
    return to;
  }

  constexpr std::array<uint16_t, 8> bits() const {
    std::array<uint16_t, 8> to{};
    for (size_t i = 0; i < to.size(); ++i) {
      const uint32_t above = high >> high_shift(i) & 0xfu;
      const uint32_t code = low[i] | (above & 7u) << 8;
      to[i] = static_cast<uint16_t>((code == 0 ? 0 : code + base(exponent)) | (above & 8u) << 12);
    }
    return to;
  }
};

}  // namespace biomoe
