#include "biomoe/data/inspect.h"

#include <fmt/format.h>

#include <algorithm>

#include "biomoe/data/alphabet.h"
#include "biomoe/data/record_audit.h"

namespace biomoe {
namespace {

using nlohmann::json;

constexpr size_t kRecordsShown = 20;
constexpr size_t kWarningsShown = 20;

class InspectSink : public SequenceSink {
 public:
  explicit InspectSink(Alphabet alphabet) : audit(alphabet) {}
  void begin_record(std::string_view name) override {
    audit.begin_record(name);
    records.push_back({{"name", name}, {"length", int64_t{0}}});
    length_ = 0;
  }
  void append(std::string_view symbols) override {
    audit.append(symbols);
    length_ += static_cast<int64_t>(symbols.size());
  }
  void end_record() override {
    audit.end_record();
    records.back()["length"] = length_;
  }

  RecordAudit audit;
  json records = json::array();

 private:
  int64_t length_ = 0;
};

std::string percent(int64_t part, int64_t whole) {
  return fmt::format("{} ({:.2f} %)", part,
                     whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string soft_masked_fate(const DataConfig& policies) {
  switch (policies.soft_masked) {
    case SoftMaskedPolicy::kUpper:
      return "read as upper case (dataset.soft_masked=upper)";
    case SoftMaskedPolicy::kKeep:
      return "keep their own tokens (dataset.soft_masked=keep)";
    case SoftMaskedPolicy::kWeight:
      break;
  }
  return fmt::format("loss weight {} (dataset.soft_masked=weight)", policies.soft_masked_weight);
}

void add_records(const json& records, std::string& out) {
  const size_t shown = std::min(records.size(), kRecordsShown);
  for (size_t i = 0; i < shown; ++i)
    out += fmt::format("  {:>14}  {}\n", records[i]["length"].get<int64_t>(),
                       shortened(records[i]["name"].get_ref<const std::string&>()));
  if (records.size() > shown) out += fmt::format("  ... and {} more\n", records.size() - shown);
}

}  // namespace

json inspect_file(const std::string& path, const ReadOptions& options, const Vocabulary* vocabulary) {
  InspectSink sink(vocabulary ? vocabulary->alphabet() : Alphabet::kNucleotide);
  read_sequences(path, options, sink);
  const SymbolCounts& counts = sink.audit.symbols();
  json symbols = json::object();
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts[i] > 0) symbols[std::string(1, static_cast<char>(i))] = counts[i];
  json inspection = {{"records", std::move(sink.records)},     {"bases", count_all(counts)},
                     {"symbols", std::move(symbols)},          {"soft_masked", count_lower_case(counts)},
                     {"degenerate", count_degenerate(counts)}, {"warnings", sink.audit.warnings()}};
  if (!vocabulary) return inspection;
  int64_t degenerate = 0, unknown = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto symbol = static_cast<uint8_t>(i);
    const int32_t id = vocabulary->id(symbol);
    if (vocabulary->is_degenerate(symbol)) degenerate += counts[i];
    if (id < 0 || id == vocabulary->special().unk) unknown += counts[i];
  }
  inspection["vocabulary"] = vocabulary->name();
  inspection["degenerate"] = degenerate;
  inspection["unknown"] = unknown;
  return inspection;
}

std::string render_inspection(const std::string& path, const json& inspection, const DataConfig& policies) {
  const json& records = inspection.at("records");
  const auto bases = inspection.at("bases").get<int64_t>();
  std::string out =
      fmt::format("{}: {}, {} bases\n", path, counted(static_cast<int64_t>(records.size()), "record"), bases);
  add_records(records, out);
  out += "symbols:";
  for (const auto& [symbol, count] : inspection.at("symbols").items())
    out += fmt::format(" {}={}", symbol, count.get<int64_t>());
  out +=
      fmt::format("\ndegenerate:  {}, {}\n", percent(inspection.at("degenerate").get<int64_t>(), bases),
                  policies.mask_degenerate_bases ? "masked from the loss (dataset.mask_degenerate_bases=true)"
                                                 : "learned (dataset.mask_degenerate_bases=false)");
  out += fmt::format("soft-masked: {}, {}\n", percent(inspection.at("soft_masked").get<int64_t>(), bases),
                     soft_masked_fate(policies));
  if (policies.n_runs == NRunPolicy::kSplit)
    out +=
        fmt::format("runs of N:   of {} or more, left out, the record split there (dataset.n_runs=split)\n",
                    policies.n_run_length);
  if (inspection.contains("vocabulary"))
    out += fmt::format("unknown:     {}, to the vocabulary {}\n",
                       percent(inspection.at("unknown").get<int64_t>(), bases),
                       inspection.at("vocabulary").get_ref<const std::string&>());
  const json& warnings = inspection.at("warnings");
  for (size_t i = 0; i < std::min(warnings.size(), kWarningsShown); ++i)
    out += fmt::format("warning: {}\n", warnings[i].get_ref<const std::string&>());
  if (warnings.size() > kWarningsShown)
    out += fmt::format("warning: ... and {} more warnings\n", warnings.size() - kWarningsShown);
  return out;
}

}  // namespace biomoe
