// Which tile a block computes next. The work of a kernel is a list of units, the same for every block: one
// output tile for each block of a cluster. Cluster c takes units c, c + clusters, c + 2 clusters, ...
#pragma once

#include <cstdint>

#include "biomoe/backend/cuda/device/mbarrier.cuh"
#include "biomoe/backend/cuda/gemm/sm90_config.cuh"

namespace biomoe::cuda::sm90 {

// Rows of tiles are visited in bands, so that what a band's blocks read in common (its rows of A, a few
// column tiles of B) stays in L2; within a band the row index is the fastest.
constexpr int kBandTiles = 16;

// Tiles of one expert, as units. With clusters of two, a unit is two tiles below each other that share B; an
// odd last row of tiles is taken two columns at a time, which share A.
template <int kCluster>
struct TileGrid {
  static constexpr int kBand = kBandTiles / kCluster;

  int groups;  // of kCluster row tiles
  int odd;     // row tiles left over (0 or 1)
  int columns;

  __device__ TileGrid(int row_tiles, int column_tiles)
      : groups(row_tiles / kCluster), odd(row_tiles % kCluster), columns(column_tiles) {}

  __device__ int units() const { return groups * columns + odd * ((columns + 1) / 2); }
};

struct TilePosition {
  int row;
  int column;
  bool share_b;  // the cluster's tiles have the same column, else the same row
};

template <int kCluster>
__device__ __forceinline__ TilePosition tile_position(const TileGrid<kCluster>& grid, int unit, int rank) {
  constexpr int kBand = TileGrid<kCluster>::kBand;
  const int full_bands = grid.groups / kBand;
  const int band_units = kBand * grid.columns;
  if (unit < full_bands * band_units) {
    const int band = unit / band_units;
    const int index = unit - band * band_units;
    return {(band * kBand + index % kBand) * kCluster + rank, index / kBand, true};
  }
  // The last band: `rest` groups and the odd row, two columns at a time.
  const int rest = grid.groups - full_bands * kBand;
  const int pair_units = 2 * rest + grid.odd;
  const int index = unit - full_bands * band_units;
  const int pair = index / pair_units;
  const int in_pair = index - pair * pair_units;
  const int pair_columns = min(2, grid.columns - 2 * pair);
  if (in_pair < rest * pair_columns) {
    const int column = in_pair / rest;
    return {(full_bands * kBand + in_pair - column * rest) * kCluster + rank, 2 * pair + column, true};
  }
  return {grid.groups * kCluster, 2 * pair + rank, false};
}

// One tile of this block, and how far its sums go.
struct Tile {
  int expert;
  int a_row;      // first row of A's buffer: of the tile, or of the segment where the sum runs over rows
  int m;          // first row of the output within A's buffer (or within dw[e])
  int n;          // first column
  int n_tile;     // n_tiles (outside of the output) where the last pair of columns has only one
  int k_begin;    // first block of k
  int k_blocks;   // the same for all blocks of the cluster
  int live_rows;  // rows of the tile beyond these are padding
  bool share_b;
  int part, parts;  // of a tile that is cut along k
  int split_tile;   // number among those of this launch
};

// Of an expert. Without offsets all rows are the real ones of one expert.
__device__ __forceinline__ int64_t segment_begin(const KernelParams& params, int expert) {
  if (params.offsets != nullptr) return params.offsets[expert];
  return expert == 0 ? 0 : (params.capacity + kTileM - 1) / kTileM * kTileM;
}
__device__ __forceinline__ int valid_rows(const KernelParams& params, int expert) {
  return params.rows_valid != nullptr ? params.rows_valid[expert] : static_cast<int>(params.capacity);
}

// Fills unit_begin[0..experts] (shared memory): the first unit of each expert. Called by one full warp.
template <class Config>
__device__ void list_units(const KernelParams& params, int32_t* unit_begin) {
  const int lane = threadIdx.x % 32;
  int32_t total = 0;
  if (lane == 0) unit_begin[0] = 0;
  for (int first = 0; first < params.experts; first += 32) {
    const int e = first + lane;
    int32_t units = 0;
    if (e < params.experts) {
      const int rows = static_cast<int>(segment_begin(params, e + 1) - segment_begin(params, e));
      if constexpr (Config::kSumOverRows) {
        const int row_tiles = (params.m_extent + kTileM - 1) / kTileM;
        const bool nothing = params.accumulate && rows == 0;
        units = nothing ? 0 : TileGrid<Config::kCluster>(row_tiles, params.n_tiles).units();
      } else {
        units = TileGrid<Config::kCluster>(rows / kTileM, params.n_tiles).units();
      }
    }
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(0xFFFFFFFFu, units, step);
      if (lane >= step) units += below;
    }
    if (e < params.experts) unit_begin[e + 1] = total + units;
    total += __shfl_sync(0xFFFFFFFFu, units, 31);
  }
}

// Walks over this block's tiles.
template <class Config>
class TileWalker {
 public:
  __device__ TileWalker(const KernelParams& params, const int32_t* unit_begin, int rank)
      : params_(params),
        unit_begin_(unit_begin),
        unit_(static_cast<int>(blockIdx.x) / Config::kCluster),
        rank_(rank) {}

  __device__ void next() { unit_ += stride(); }

  // The current tile; k_blocks is negative after the last one.
  __device__ Tile tile() {
    const int units = unit_begin_[params_.experts];
    int unit = unit_;
    int parts = 1;
    int part = 0;
    const int last_wave = units / stride() * stride();
    if (params_.workspace != nullptr && unit >= last_wave) {
      const int most = min(kMaxSplits, params_.k_extent / (kMinSplitBlocks * Config::kTileK));
      parts = max(1, min(most, stride() / max(1, units - last_wave)));
      part = (unit - last_wave) % parts;
      unit = last_wave + (unit - last_wave) / parts;
    }
    if (unit >= units) return {.k_blocks = -1};
    while (unit >= unit_begin_[expert_ + 1]) ++expert_;
    const int64_t segment = segment_begin(params_, expert_);
    const int valid = valid_rows(params_, expert_);
    const int row_tiles = Config::kSumOverRows
                              ? (params_.m_extent + kTileM - 1) / kTileM
                              : static_cast<int>(segment_begin(params_, expert_ + 1) - segment) / kTileM;
    const TileGrid<Config::kCluster> grid(row_tiles, params_.n_tiles);
    const TilePosition at = tile_position(grid, unit - unit_begin_[expert_], rank_);
    Tile tile;
    tile.expert = expert_;
    tile.n_tile = at.column;
    tile.n = at.column * Config::kTileN;
    tile.share_b = at.share_b;
    if constexpr (Config::kSumOverRows) {
      tile.a_row = static_cast<int>(segment);
      tile.m = at.row * kTileM;
      tile.live_rows = valid > 0 ? kTileM : 0;
      tile.k_blocks = (valid + Config::kTileK - 1) / Config::kTileK;
    } else {
      tile.a_row = static_cast<int>(segment) + at.row * kTileM;
      tile.m = tile.a_row;
      tile.live_rows = valid - at.row * kTileM;
      const int first_row = at.share_b ? (at.row - rank_) * kTileM : at.row * kTileM;
      tile.k_blocks = first_row < valid ? (params_.k_extent + Config::kTileK - 1) / Config::kTileK : 0;
    }
    tile.part = part;
    tile.parts = parts;
    tile.split_tile = (unit - last_wave) * Config::kCluster + rank_;
    tile.k_begin = tile.k_blocks * part / parts;
    tile.k_blocks = tile.k_blocks * (part + 1) / parts - tile.k_begin;
    return tile;
  }

 private:
  __device__ static int stride() { return static_cast<int>(gridDim.x) / Config::kCluster; }

  const KernelParams& params_;
  const int32_t* unit_begin_;
  int unit_;
  int rank_;
  int expert_ = 0;
};

// Tiles on their way from the producer to the consumer warpgroups, in shared memory. Both ends count turns.
class TileQueue {
 public:
  __device__ TileQueue(uint32_t tiles, uint32_t barriers) : tiles_(tiles), barriers_(barriers) {}

  __device__ void init() const {
    for (int slot = 0; slot < kTileSlots; ++slot) {
      mbarrier_init(full(slot), 1);
      mbarrier_init(empty(slot), kConsumerWarps);
    }
  }

  // One thread.
  __device__ void push(const Tile& tile) {
    const int slot = turn_ % kTileSlots;
    mbarrier_wait(empty(slot), turn_ / kTileSlots & 1 ^ 1);
    const uint32_t at = tiles_ + slot * kTileBytes;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(tile.expert),
                 "r"(tile.part | tile.parts << 8 | tile.split_tile << 16), "r"(tile.m), "r"(tile.n)
                 : "memory");
    asm volatile("st.shared.v4.b32 [%0 + 16], {%1, %2, %3, %4};" ::"r"(at), "r"(tile.n_tile),
                 "r"(tile.k_blocks), "r"(tile.live_rows), "r"(0)
                 : "memory");
    mbarrier_arrive(full(slot));
    ++turn_;
  }

  // Every thread of the consumers, who have no use for a_row, k_begin and share_b.
  __device__ Tile pop() {
    const int slot = turn_ % kTileSlots;
    mbarrier_wait(full(slot), turn_ / kTileSlots & 1);
    const uint32_t at = tiles_ + slot * kTileBytes;
    Tile tile{};
    int split;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.expert), "=r"(split), "=r"(tile.m), "=r"(tile.n)
                 : "r"(at)
                 : "memory");
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, _}, [%3 + 16];"
                 : "=r"(tile.n_tile), "=r"(tile.k_blocks), "=r"(tile.live_rows)
                 : "r"(at)
                 : "memory");
    tile.part = split & 0xFF;
    tile.parts = split >> 8 & 0xFF;
    tile.split_tile = split >> 16;
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(slot));
    ++turn_;
    return tile;
  }

 private:
  __device__ uint32_t full(int slot) const { return barriers_ + slot * 8; }
  __device__ uint32_t empty(int slot) const { return barriers_ + (kTileSlots + slot) * 8; }

  uint32_t tiles_, barriers_;
  int turn_ = 0;
};

}  // namespace biomoe::cuda::sm90
