// BatchAssembler: turns planned sequences into the token ids, targets and loss weights of a Batch.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "biomoe/data/batch.h"
#include "biomoe/data/batch_planner.h"
#include "biomoe/data/data_config.h"
#include "biomoe/data/sequence_store.h"
#include "biomoe/data/vocabulary.h"

namespace biomoe {

// A target gets loss weight 0 and kIgnoreTarget when there is none, when its symbol is degenerate (with
// mask_degenerate_bases), when its weight comes out as 0, or (with score_each_base_once) when the window
// before predicts it. A lower-case target has soft_masked_weight under soft_masked=weight; every other target
// has 1.
struct LossPolicies {
  bool mask_degenerate_bases = true;
  SoftMaskedPolicy soft_masked = SoftMaskedPolicy::kUpper;
  double soft_masked_weight = 0.1;
  bool score_each_base_once = false;
};

// Where a packed sequence came from.
struct SequenceSource {
  int64_t record = 0;
  int64_t begin = 0;  // first base of the window, on the forward strand
  int64_t bases = 0;
  int64_t window = 0;
  bool reversed = false;
  bool operator==(const SequenceSource&) const = default;
};

class BatchAssembler {
 public:
  // `store` must outlive the assembler; of the vocabulary a copy of its tables is kept. Throws user_error
  // when BOS or EOS are planned and the vocabulary has none, or for a reverse complement of protein.
  BatchAssembler(const SequenceStore& store, const Vocabulary& vocabulary, const LossPolicies& policies,
                 const WindowOptions& windows, double reverse_complement_prob);

  // Replaces `batch` by the planned sequences in order. `scratch` is for the bases of a window; nothing is
  // allocated once the vectors have grown. Const, so that threads may share it.
  void assemble(const std::vector<PlannedSequence>& planned, Batch& batch,
                std::vector<uint8_t>& scratch) const;

 private:
  struct SymbolRow {
    int32_t id = 0;
    float weight = 0;         // loss weight as a target
    bool degenerate = false;  // masked from the loss for being degenerate
    bool soft_masked = false;
  };
  void append(const PlannedSequence& sequence, Batch& batch, std::vector<uint8_t>& scratch) const;
  // The bases of the sequence in reading order, and the one after them when there is one.
  const uint8_t* load_bases(const PlannedSequence& sequence, std::vector<uint8_t>& scratch) const;

  const SequenceStore& store_;
  std::array<SymbolRow, 256> rows_;
  std::array<uint8_t, 256> complement_{};
  int32_t bos_ = 0;
  int32_t eos_ = 0;
  bool score_each_base_once_;
};

}  // namespace biomoe
