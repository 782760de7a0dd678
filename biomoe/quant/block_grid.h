// How a matrix of rows in groups (experts) is cut into blocks that share a scale, for the host and the
// device.
#pragma once

#include <cstdint>

namespace biomoe {

// Blocks of rows x columns; 0 means all rows of the group, or all columns.
struct BlockShape {
  int64_t rows = 1;
  int64_t columns = 32;
  friend constexpr bool operator==(const BlockShape&, const BlockShape&) = default;
};

// Groups are either consecutive rows [offsets[g], offsets[g + 1]), or all of group_rows rows, or (group_rows
// = 0, no offsets) the whole matrix. A block does not cross from one group into the next: a group begins with
// a new block, and its last one may be cut short, as blocks at the right edge may be. Rows from
// offsets[groups] on belong to no block.
struct BlockGrid {
  int64_t rows = 0;
  int64_t columns = 0;
  BlockShape block;
  const int64_t* offsets = nullptr;
  int64_t group_rows = 0;
  int64_t groups = 1;

  struct Band {
    int64_t group = 0;
    int64_t row_begin = 0;
    int64_t row_end = 0;  // row_begin: the band has no rows
  };

  constexpr bool grouped() const { return offsets != nullptr || group_rows > 0; }
  constexpr int64_t group_begin(int64_t group) const {
    if (offsets) return offsets[group];
    return group_rows > 0 ? group * group_rows : (group == 0 ? 0 : rows);
  }
  // Rows of the matrix of scales. With groups it is an upper bound that does not depend on the offsets: a
  // group owns (rows / block.rows) of them, rounded down and counted from its first row, and one more.
  constexpr int64_t bands() const {
    if (block.rows == 0) return groups;
    return grouped() ? rows / block.rows + groups : (rows + block.rows - 1) / block.rows;
  }
  constexpr int64_t block_columns() const {
    return block.columns == 0 ? (columns > 0 ? 1 : 0) : (columns + block.columns - 1) / block.columns;
  }
  constexpr int64_t first_band(int64_t group) const {
    return block.rows == 0 ? group : group_begin(group) / block.rows + group;
  }
  constexpr int64_t group_of_band(int64_t band) const {
    if (!grouped()) return 0;
    int64_t low = 0, high = groups - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_band(middle) <= band) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  // The group of a row below group_begin(groups).
  constexpr int64_t group_of_row(int64_t row) const {
    int64_t low = 0, high = groups - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (group_begin(middle) <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  constexpr Band band(int64_t index) const {
    const int64_t group = group_of_band(index);
    const int64_t begin = group_begin(group), end = group_begin(group + 1);
    if (block.rows == 0) return {group, begin, end};
    const int64_t first = begin + (index - (grouped() ? first_band(group) : 0)) * block.rows;
    if (first >= end) return {group, end, end};
    return {group, first, first + block.rows < end ? first + block.rows : end};
  }
};

}  // namespace biomoe
