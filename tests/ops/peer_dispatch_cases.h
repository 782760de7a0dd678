// Ranks that split experts, all in one process: what peer_plan, send_rows and fetch_rows must do, worked out
// slot by slot in the plain way.
#pragma once

#include <cstdint>
#include <vector>

#include "biomoe/core/rng.h"

namespace biomoe::test {

struct PeerCase {
  int64_t ranks, experts, top_k, alignment, width;
  std::vector<int64_t> tokens;  // of each rank
  int32_t only = -1;            // every slot goes there; -1: anywhere
};

inline const std::vector<PeerCase>& peer_cases() {
  static const std::vector<PeerCase> cases{{1, 8, 2, 128, 16, {33}},
                                           {2, 8, 2, 128, 24, {64, 64}},
                                           {2, 8, 2, 1, 5, {0, 7}},
                                           {2, 4, 2, 128, 8, {0, 0}},
                                           {4, 8, 2, 128, 40, {1, 129, 0, 31}},
                                           {2, 64, 8, 16, 16, {100, 3}},
                                           {4, 4, 1, 32, 8, {20, 20, 20, 20}, 2},
                                           {8, 256, 8, 128, 8, {9, 9, 9, 9, 9, 9, 9, 9}}};
  return cases;
}

// Of all ranks of a case.
struct PeerReference {
  std::vector<std::vector<int32_t>> experts;      // [rank][slot]
  std::vector<int32_t> counts;                    // [P, E]
  std::vector<std::vector<int32_t>> row_of_slot;  // [rank][slot]
  std::vector<std::vector<int64_t>> offsets;      // [rank][E / P + 1]
  std::vector<std::vector<int32_t>> rows;         // [rank][E / P]
  int64_t capacity = 0;                           // rows that are enough on any rank

  explicit PeerReference(const PeerCase& c)
      : counts(static_cast<size_t>(c.ranks * c.experts)), rows(static_cast<size_t>(c.ranks)) {
    const int64_t held = c.experts / c.ranks;
    for (int64_t rank = 0; rank < c.ranks; ++rank) {
      const Rng rng(static_cast<uint64_t>(rank), RngStream::kTest);
      std::vector<int32_t>& of_slot = experts.emplace_back();
      for (int64_t s = 0; s < c.tokens[static_cast<size_t>(rank)] * c.top_k; ++s) {
        of_slot.push_back(c.only >= 0 ? c.only
                                      : static_cast<int32_t>(rng.u64(static_cast<uint64_t>(s)) %
                                                             static_cast<uint64_t>(c.experts)));
        ++counts[static_cast<size_t>(rank * c.experts + of_slot.back())];
      }
      row_of_slot.emplace_back(of_slot.size());
    }
    for (int64_t home = 0; home < c.ranks; ++home) {
      std::vector<int64_t>& begins = offsets.emplace_back(1, 0);
      for (int64_t e = home * held; e < (home + 1) * held; ++e) {
        int64_t row = begins.back();
        for (int64_t rank = 0; rank < c.ranks; ++rank) {
          const auto& of_slot = experts[static_cast<size_t>(rank)];
          for (size_t s = 0; s < of_slot.size(); ++s) {
            if (of_slot[s] == e) row_of_slot[static_cast<size_t>(rank)][s] = static_cast<int32_t>(row++);
          }
        }
        rows[static_cast<size_t>(home)].push_back(static_cast<int32_t>(row - begins.back()));
        const int64_t count = row - begins.back();
        begins.push_back(begins.back() + (count + c.alignment - 1) / c.alignment * c.alignment);
      }
      capacity = std::max(capacity, begins.back());
    }
  }
};

}  // namespace biomoe::test
