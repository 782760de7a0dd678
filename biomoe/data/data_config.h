// The `dataset` section of a run's configuration.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace biomoe {

// What a lower-case (soft-masked) base becomes.
enum class SoftMaskedPolicy { kUpper, kKeep, kWeight };
inline constexpr std::array<std::string_view, 3> kSoftMaskedPolicyNames{"upper", "keep", "weight"};

// What a long run of N does to a record.
enum class NRunPolicy { kKeep, kSplit };
inline constexpr std::array<std::string_view, 2> kNRunPolicyNames{"keep", "split"};

struct DataConfig {
  std::vector<std::string> path;
  std::vector<std::string> validation_path;
  double validation_fraction = 0.0;
  std::string tokenizer_name_or_path = "nucleotide";
  std::string text_column = "text";
  int64_t max_seq_length = 1024;
  int64_t stride = 0;
  int64_t token_micro_batch_size = 4096;
  int64_t num_workers = 1;
  int64_t shuffle_seed = 0;
  bool shuffle = true;
  bool add_bos = true;
  bool add_eos = true;
  bool mask_degenerate_bases = true;
  SoftMaskedPolicy soft_masked = SoftMaskedPolicy::kUpper;
  double soft_masked_weight = 0.1;
  NRunPolicy n_runs = NRunPolicy::kSplit;
  int64_t n_run_length = 100;
  double reverse_complement_prob = 0.0;

  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("path", path,
            "FASTA, FASTQ or JSONL files (plain, gzip, bgzip, zstd); globs are expanded in name order");
    v.field("validation_path", validation_path, "files held out for validation");
    v.field(
        "validation_fraction", validation_fraction,
        "without validation_path: the last part of the bases, in file order, held out (0.1 = last tenth)");
    v.field("tokenizer_name_or_path", tokenizer_name_or_path,
            "nucleotide (byte values), dna (compact), protein, or the path of a tokenizer.json");
    v.field("text_column", text_column, "JSONL: the field that holds the sequence");
    v.field("max_seq_length", max_seq_length, "tokens of a window");
    v.field("stride", stride,
            "tokens that consecutive windows of a record share (the overlap, as in the recipe)");
    v.field("token_micro_batch_size", token_micro_batch_size, "most tokens packed into one micro-batch");
    v.field("num_workers", num_workers, "loader threads; the order of batches does not depend on it");
    v.field("shuffle_seed", shuffle_seed,
            "seed of the permutation of windows and of the reverse-complement draw");
    v.field("shuffle", shuffle, "false reads windows in file order");
    v.field("add_bos", add_bos, "BOS before the first base of a record");
    v.field("add_eos", add_eos, "EOS after the last base of a record");
    v.field("mask_degenerate_bases", mask_degenerate_bases, "keep N and other IUPAC codes out of the loss");
    v.choice("soft_masked", soft_masked, kSoftMaskedPolicyNames,
             "lower-case bases: upper (read as upper case), keep (their own tokens), weight (upper case, "
             "loss weight)");
    v.field("soft_masked_weight", soft_masked_weight,
            "loss weight of lower-case bases when soft_masked=weight");
    v.choice("n_runs", n_runs, kNRunPolicyNames, "runs of N: keep, or split the record around them");
    v.field("n_run_length", n_run_length, "runs of at least this many N are split out");
    v.field("reverse_complement_prob", reverse_complement_prob,
            "chance that a window is read from the other strand");
  }
};

}  // namespace biomoe
