#include "biomoe/data/batch_assembler.h"

#include <algorithm>

#include "biomoe/core/error.h"
#include "biomoe/data/alphabet.h"

namespace biomoe {
namespace {

int32_t required_token(const std::optional<int32_t>& token, bool wanted, const char* key,
                       const Vocabulary& v) {
  if (wanted && !token)
    throw user_error("{}=true: the vocabulary {} has no such token; set {}=false", key, v.name(), key);
  return token.value_or(0);
}

}  // namespace

BatchAssembler::BatchAssembler(const SequenceStore& store, const Vocabulary& vocabulary,
                               const LossPolicies& policies, const WindowOptions& windows,
                               double reverse_complement_prob)
    : store_(store), score_each_base_once_(policies.score_each_base_once) {
  bos_ = required_token(vocabulary.special().bos, windows.add_bos, "add_bos", vocabulary);
  eos_ = required_token(vocabulary.special().eos, windows.add_eos, "add_eos", vocabulary);
  if (reverse_complement_prob > 0) complement_ = vocabulary.complement();
  for (size_t c = 0; c < rows_.size(); ++c) {
    const auto symbol = static_cast<uint8_t>(c);
    SymbolRow& row = rows_[c];
    row.id = vocabulary.id(symbol);
    row.degenerate = policies.mask_degenerate_bases && vocabulary.is_degenerate(symbol);
    row.soft_masked = is_lower(symbol);
    row.weight = 1.0f;
    if (row.soft_masked && policies.soft_masked == SoftMaskedPolicy::kWeight)
      row.weight = static_cast<float>(policies.soft_masked_weight);
    if (row.degenerate) row.weight = 0.0f;
  }
}

const uint8_t* BatchAssembler::load_bases(const PlannedSequence& sequence,
                                          std::vector<uint8_t>& scratch) const {
  const int64_t extra = sequence.next_base ? 1 : 0;
  const int64_t count = sequence.length + extra;
  if (static_cast<int64_t>(scratch.size()) < count) scratch.resize(static_cast<size_t>(count));
  if (!sequence.reversed) {
    store_.read(sequence.record, sequence.begin, count, scratch.data());
    return scratch.data();
  }
  store_.read(sequence.record, sequence.begin - extra, count, scratch.data());
  std::reverse(scratch.begin(), scratch.begin() + count);
  std::transform(scratch.begin(), scratch.begin() + count, scratch.begin(),
                 [&](uint8_t symbol) { return complement_[symbol]; });
  return scratch.data();
}

void BatchAssembler::append(const PlannedSequence& sequence, Batch& batch,
                            std::vector<uint8_t>& scratch) const {
  const uint8_t* bases = load_bases(sequence, scratch);
  const auto offset = batch.tokens.size();
  const int64_t lead = sequence.bos ? 1 : 0;
  const int64_t count = sequence.num_tokens();
  const int64_t target_bases = sequence.length + (sequence.next_base ? 1 : 0);
  const int64_t ignored = score_each_base_once_ ? sequence.overlap : 0;
  const auto size = offset + static_cast<size_t>(count);
  batch.tokens.resize(size);
  batch.targets.resize(size);
  batch.loss_weights.resize(size);
  batch.positions.resize(size);
  int32_t* tokens = batch.tokens.data() + offset;
  int32_t* targets = batch.targets.data() + offset;
  float* weights = batch.loss_weights.data() + offset;
  int32_t* positions = batch.positions.data() + offset;

  MaskCounts& counts = batch.counts;
  for (int64_t p = 0; p < count; ++p) {
    positions[p] = static_cast<int32_t>(p);
    if (p < lead) {
      tokens[p] = bos_;
    } else {
      const SymbolRow& row = rows_[bases[p - lead]];
      tokens[p] = row.id;
      counts.soft_masked += row.soft_masked;
    }
    targets[p] = kIgnoreTarget;
    weights[p] = 0.0f;
    const int64_t target = p + 1 - lead;
    if (p < ignored) continue;
    if (target < target_bases) {
      const SymbolRow& row = rows_[bases[target]];
      counts.degenerate_masked += row.degenerate;
      if (row.weight > 0) {
        targets[p] = row.id;
        weights[p] = row.weight;
      }
    } else if (sequence.eos_target) {
      targets[p] = eos_;
      weights[p] = 1.0f;
    }
    batch.valid_targets += weights[p] > 0;
    batch.target_weight += static_cast<double>(weights[p]);
  }
  counts.bases += sequence.length;
  counts.n_run_skipped += sequence.n_run_skipped;
  counts.reverse_complemented += sequence.reversed;
  batch.cu_seqlens.push_back(static_cast<int32_t>(size));
}

void BatchAssembler::assemble(const std::vector<PlannedSequence>& planned, Batch& batch,
                              std::vector<uint8_t>& scratch) const {
  batch.clear();
  for (const PlannedSequence& sequence : planned) append(sequence, batch, scratch);
}

}  // namespace biomoe
