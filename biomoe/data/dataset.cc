#include "biomoe/data/dataset.h"

#include <glob.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "biomoe/core/error.h"
#include "biomoe/data/alphabet.h"
#include "biomoe/data/record_audit.h"

namespace biomoe {
namespace {

constexpr int64_t kMaxBatchTokens = std::numeric_limits<int32_t>::max();  // cu_seqlens are 32-bit
constexpr int64_t kMaxWorkers = 256;
constexpr size_t kMaxWarnings = 200;

// A store, what was counted while it was filled, and the files it came from.
struct OpenedFiles {
  std::shared_ptr<const SequenceStore> store;
  SymbolCounts symbols{};
  std::vector<FileReport> files;
  std::vector<std::string> warnings;
  int64_t records = 0;
};

class StoreAndAudit : public SequenceSink {
 public:
  explicit StoreAndAudit(Alphabet alphabet) : audit(alphabet) {}
  void begin_record(std::string_view name) override {
    store.begin_record(name);
    audit.begin_record(name);
  }
  void append(std::string_view symbols) override {
    store.append(symbols);
    audit.append(symbols);
  }
  void end_record() override {
    store.end_record();
    audit.end_record();
  }
  StoreBuilder store;
  RecordAudit audit;
};

OpenedFiles open_files(const std::vector<std::string>& patterns, const DataConfig& config,
                       const Vocabulary& vocabulary) {
  OpenedFiles out;
  StoreAndAudit sink(vocabulary.alphabet());
  for (const std::string& path : expand_paths(patterns)) {
    const int64_t records = sink.store.num_records();
    const int64_t bases = sink.store.num_bases();
    const SequenceFormat format = read_sequences(path, {.text_column = config.text_column}, sink);
    out.files.push_back({.path = path,
                         .format = format,
                         .records = sink.store.num_records() - records,
                         .bases = sink.store.num_bases() - bases});
  }
  out.records = sink.store.num_records();
  out.symbols = sink.audit.symbols();
  for (std::string& warning : sink.audit.warnings()) out.warnings.push_back(std::move(warning));
  out.store = sink.store.finish();
  return out;
}

// The first place where `symbol` occurs, to be named in a message.
std::string place_of(const SequenceStore& store, uint8_t symbol) {
  constexpr int64_t kChunk = int64_t{1} << 20;
  std::vector<uint8_t> bases(static_cast<size_t>(kChunk));
  for (int64_t record = 0; record < store.num_records(); ++record)
    for (int64_t begin = 0; begin < store.length(record); begin += kChunk) {
      const int64_t count = std::min(kChunk, store.length(record) - begin);
      store.read(record, begin, count, bases.data());
      const auto end = bases.begin() + count;
      const auto found = std::find(bases.begin(), end, symbol);
      if (found != end)
        return fmt::format("record '{}', base {}", store.name(record), begin + (found - bases.begin()) + 1);
    }
  return "a record";
}

void count_symbols(const OpenedFiles& opened, const Vocabulary& vocabulary, DataReport& report) {
  const bool rna_as_dna = vocabulary.id('U') >= 0 && vocabulary.id('U') == vocabulary.id('T');
  for (size_t c = 0; c < opened.symbols.size(); ++c) {
    const auto symbol = static_cast<uint8_t>(c);
    const int64_t count = opened.symbols[c];
    if (count == 0) continue;
    const int32_t id = vocabulary.id(symbol);
    if (id < 0)
      throw user_error("{}: the vocabulary {} has no token for '{}' and none for unknown symbols",
                       place_of(*opened.store, symbol), vocabulary.name(), static_cast<char>(symbol));
    if (id == vocabulary.special().unk) report.unknown += count;
    if (vocabulary.is_degenerate(symbol)) report.degenerate += count;
    if (rna_as_dna && (symbol == 'U' || symbol == 'u')) report.rna_bases += count;
  }
  report.bases += count_all(opened.symbols);
  report.soft_masked += count_lower_case(opened.symbols);
  report.records += opened.records;
  report.files.insert(report.files.end(), opened.files.begin(), opened.files.end());
  for (const std::string& warning : opened.warnings)
    if (report.warnings.size() < kMaxWarnings) report.warnings.push_back(warning);
}

std::vector<Segment> segments_of(const SequenceStore& store, const DataConfig& config,
                                 const Vocabulary& vocabulary, NRunTotals& totals) {
  // In protein N is asparagine.
  if (config.n_runs == NRunPolicy::kKeep || vocabulary.alphabet() == Alphabet::kProtein)
    return whole_records(store);
  return split_n_runs(store, config.n_run_length, totals);
}

std::shared_ptr<const SequencePart> make_part(std::shared_ptr<const SequenceStore> store,
                                              std::vector<Segment> segments, const DataConfig& config,
                                              PartReport& report) {
  const WindowOptions options{.max_seq_length = config.max_seq_length,
                              .stride = config.stride,
                              .add_bos = config.add_bos,
                              .add_eos = config.add_eos};
  auto part = std::make_shared<SequencePart>(
      SequencePart{.store = std::move(store), .windows = WindowIndex(std::move(segments), options)});
  report = {.bases = part->windows.num_bases(),
            .segments = part->windows.num_segments(),
            .windows = part->windows.num_windows()};
  return part;
}

std::string first_of(const std::vector<std::string>& paths) {
  return paths.size() == 1 ? paths[0] : fmt::format("{} and {} more", paths[0], paths.size() - 1);
}

void require_windows(const PartReport& part, const std::string& what) {
  if (part.windows == 0) throw user_error("{}", what);
}

// The same for every name of a file.
std::string identity_of(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::weakly_canonical(path, ignored).string();
}

void require_apart(const std::vector<std::string>& train, const std::vector<std::string>& validation) {
  std::set<std::string> trained_on;
  for (const std::string& path : expand_paths(train)) trained_on.insert(identity_of(path));
  for (const std::string& path : expand_paths(validation))
    if (trained_on.count(identity_of(path)) > 0)
      throw user_error(
          "dataset.validation_path: {} is in dataset.path too; hold out another file, or set "
          "dataset.validation_fraction",
          path);
}

bool is_fraction(double value) {
  return value >= 0.0 && value <= 1.0;
}  // false for NaN

}  // namespace

void validate_data_config(const DataConfig& c) {
  const auto require = [](bool good, const char* key, auto value, const std::string& rule) {
    if (!good) throw user_error("dataset.{}={}: {}", key, value, rule);
  };
  for (const auto* list : {&c.path, &c.validation_path})
    for (const std::string& path : *list)
      if (path.empty()) throw user_error("dataset.path: a path is empty");
  require(c.validation_fraction >= 0 && c.validation_fraction < 1, "validation_fraction",
          c.validation_fraction, "must be at least 0 and below 1");
  require(c.validation_path.empty() || c.validation_fraction == 0, "validation_fraction",
          c.validation_fraction, "give validation_path or validation_fraction, not both");
  require(!c.tokenizer_name_or_path.empty(), "tokenizer_name_or_path", "", "must not be empty");
  require(!c.text_column.empty(), "text_column", "", "must not be empty");
  require(c.max_seq_length >= 1, "max_seq_length", c.max_seq_length, "must be at least 1");
  require(c.stride >= 0 && c.stride < c.max_seq_length, "stride", c.stride,
          fmt::format("must be at least 0 and below max_seq_length={}", c.max_seq_length));
  require(c.token_micro_batch_size >= c.max_seq_length, "token_micro_batch_size", c.token_micro_batch_size,
          fmt::format("must be at least max_seq_length={}, or a window would not fit", c.max_seq_length));
  require(c.token_micro_batch_size <= kMaxBatchTokens, "token_micro_batch_size", c.token_micro_batch_size,
          fmt::format("must be at most {}", kMaxBatchTokens));
  require(c.num_workers >= 0 && c.num_workers <= kMaxWorkers, "num_workers", c.num_workers,
          fmt::format("must be between 0 and {}", kMaxWorkers));
  require(is_fraction(c.soft_masked_weight), "soft_masked_weight", c.soft_masked_weight,
          "must be between 0 and 1");
  require(c.n_run_length >= 1, "n_run_length", c.n_run_length, "must be at least 1");
  require(is_fraction(c.reverse_complement_prob), "reverse_complement_prob", c.reverse_complement_prob,
          "must be between 0 and 1");
}

std::vector<std::string> expand_paths(const std::vector<std::string>& patterns) {
  std::vector<std::string> out;
  for (const std::string& pattern : patterns) {
    std::error_code ignored;
    const bool is_glob = pattern.find_first_of("*?[") != std::string::npos;
    if (!is_glob || std::filesystem::exists(pattern, ignored)) {
      out.push_back(pattern);
      continue;
    }
    glob_t found{};
    const int result = glob(pattern.c_str(), 0, nullptr, &found);
    std::vector<std::string> matches(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (result != 0 || matches.empty()) throw user_error("{}: the pattern matches no file", pattern);
    std::sort(matches.begin(), matches.end());  // by byte, whatever the locale
    out.insert(out.end(), matches.begin(), matches.end());
  }
  std::set<std::string> seen;
  for (const std::string& path : out) {
    if (printable_utf8(path) != path)
      throw user_error("{}: the name is not UTF-8 text, as which reports hold it; rename the file",
                       printable_utf8(path));
    if (!seen.insert(identity_of(path)).second)
      throw user_error("{}: the same file is named twice; name it once", path);
  }
  return out;
}

Dataset open_dataset(const DataConfig& config) {
  validate_data_config(config);
  if (config.path.empty())
    throw user_error("dataset.path is empty: name at least one FASTA, FASTQ or JSONL file");
  Dataset out{.train = nullptr,
              .validation = nullptr,
              .vocabulary = Vocabulary::open(config.tokenizer_name_or_path, config.soft_masked),
              .report = {}};
  DataReport& report = out.report;
  require_apart(config.path, config.validation_path);
  if (config.reverse_complement_prob > 0) static_cast<void>(out.vocabulary.complement());

  const OpenedFiles opened = open_files(config.path, config, out.vocabulary);
  count_symbols(opened, out.vocabulary, report);
  std::vector<Segment> segments = segments_of(*opened.store, config, out.vocabulary, report.n_runs);
  std::vector<Segment> held_out;
  if (config.validation_fraction > 0) {
    TrainValidation split = split_validation(*opened.store, segments, config.validation_fraction);
    segments = std::move(split.train);
    held_out = std::move(split.validation);
  }
  out.train = make_part(opened.store, std::move(segments), config, report.train);
  require_windows(report.train, fmt::format("{}: no base to train on", first_of(config.path)));

  if (!config.validation_path.empty()) {
    const OpenedFiles other = open_files(config.validation_path, config, out.vocabulary);
    count_symbols(other, out.vocabulary, report);
    out.validation = make_part(other.store, segments_of(*other.store, config, out.vocabulary, report.n_runs),
                               config, report.validation);
    require_windows(report.validation,
                    fmt::format("{}: no base to validate on", first_of(config.validation_path)));
  } else if (config.validation_fraction > 0) {
    out.validation = make_part(opened.store, std::move(held_out), config, report.validation);
    require_windows(
        report.validation,
        fmt::format("dataset.validation_fraction={}: holds out no base of {}; set it higher or to 0",
                    config.validation_fraction, first_of(config.path)));
  }
  return out;
}

void require_targets(const Dataset& dataset, const DataConfig& config) {
  LoaderOptions options = validation_loader_options(config);
  options.num_workers = 0;
  Loader loader(dataset.train, dataset.vocabulary, options);
  Batch batch;
  const int32_t eos = dataset.vocabulary.special().eos.value_or(-1);
  while (loader.next(batch)) {
    for (size_t i = 0; i < batch.targets.size(); ++i) {
      if (batch.loss_weights[i] != 0 && batch.targets[i] != eos) return;
    }
  }
  throw user_error(
      "{}: no token of a sequence counts in the loss: each is masked (dataset.mask_degenerate_bases, "
      "dataset.soft_masked_weight) "
      "or has none before it (records of one base without dataset.add_bos and add_eos); there is nothing to "
      "learn",
      first_of(config.path));
}

std::shared_ptr<const SequencePart> open_sequences(const std::vector<std::string>& paths,
                                                   const DataConfig& config, const Vocabulary& vocabulary,
                                                   DataReport* report) {
  DataReport found;
  if (paths.empty()) throw user_error("no path was given: name at least one FASTA, FASTQ or JSONL file");
  const OpenedFiles opened = open_files(paths, config, vocabulary);
  count_symbols(opened, vocabulary, found);
  auto part = make_part(opened.store, segments_of(*opened.store, config, vocabulary, found.n_runs), config,
                        found.train);
  require_windows(found.train, fmt::format("{}: holds no base", first_of(paths)));
  if (report != nullptr) *report = std::move(found);
  return part;
}

size_t dataset_bytes(const Dataset& dataset) {
  size_t bytes = dataset.train->store->memory_bytes() + dataset.train->windows.memory_bytes();
  if (!dataset.validation) return bytes;
  bytes += dataset.validation->windows.memory_bytes();
  if (dataset.validation->store != dataset.train->store) bytes += dataset.validation->store->memory_bytes();
  return bytes;
}

LoaderOptions train_loader_options(const DataConfig& config, const RankOfWorld& place) {
  LoaderOptions options;
  options.plan = {.token_micro_batch_size = config.token_micro_batch_size,
                  .seed = static_cast<uint64_t>(config.shuffle_seed),
                  .shuffle = config.shuffle,
                  .repeat = true,
                  .rank = place.rank,
                  .world = place.world,
                  .reverse_complement_prob = config.reverse_complement_prob};
  options.policies = {.mask_degenerate_bases = config.mask_degenerate_bases,
                      .soft_masked = config.soft_masked,
                      .soft_masked_weight = config.soft_masked_weight,
                      .score_each_base_once = false};
  options.num_workers = config.num_workers;
  return options;
}

LoaderOptions validation_loader_options(const DataConfig& config, const RankOfWorld& place) {
  LoaderOptions options = train_loader_options(config, place);
  options.plan.shuffle = false;
  options.plan.repeat = false;
  options.plan.reverse_complement_prob = 0.0;
  options.policies.score_each_base_once = true;
  return options;
}

}  // namespace biomoe
