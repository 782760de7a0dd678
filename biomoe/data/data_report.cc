#include "biomoe/data/data_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "biomoe/data/record_audit.h"

namespace biomoe {
namespace {

constexpr size_t kFilesShown = 10;
constexpr size_t kWarningsShown = 20;

nlohmann::json part_json(const PartReport& part) {
  return {{"bases", part.bases}, {"segments", part.segments}, {"windows", part.windows}};
}

std::string part_text(const char* name, const PartReport& part) {
  return fmt::format("{}: {} bases in {}, {}\n", name, part.bases, counted(part.segments, "segment"),
                     counted(part.windows, "window"));
}

void count_line(std::string& out, int64_t count, const char* what) {
  if (count > 0) out += fmt::format("  {} {}\n", count, what);
}

}  // namespace

nlohmann::json DataReport::json() const {
  nlohmann::json file_list = nlohmann::json::array();
  for (const FileReport& file : files)
    file_list.push_back({{"path", file.path},
                         {"format", sequence_format_name(file.format)},
                         {"records", file.records},
                         {"bases", file.bases}});
  return {{"files", file_list},
          {"records", records},
          {"bases", bases},
          {"degenerate", degenerate},
          {"soft_masked", soft_masked},
          {"unknown", unknown},
          {"rna_bases", rna_bases},
          {"n_runs", n_runs.runs},
          {"n_run_bases", n_runs.bases},
          {"train", part_json(train)},
          {"validation", part_json(validation)},
          {"warnings", warnings}};
}

std::string DataReport::text() const {
  std::string out =
      fmt::format("data: {}, {}, {} bases\n", counted(static_cast<int64_t>(files.size()), "file"),
                  counted(records, "record"), bases);
  for (size_t i = 0; i < std::min(files.size(), kFilesShown); ++i)
    out += fmt::format("  {} ({}): {}, {} bases\n", files[i].path, sequence_format_name(files[i].format),
                       counted(files[i].records, "record"), files[i].bases);
  if (files.size() > kFilesShown) out += fmt::format("  ... and {} more files\n", files.size() - kFilesShown);
  count_line(out, degenerate, "degenerate symbols");
  count_line(out, soft_masked, "soft-masked (lower-case) symbols");
  count_line(out, unknown, "symbols unknown to the vocabulary");
  count_line(out, rna_bases, "U read as T");
  if (n_runs.runs > 0) out += fmt::format("  {} N in {} runs split out\n", n_runs.bases, n_runs.runs);
  out += part_text("train", train);
  if (validation.windows > 0) out += part_text("validation", validation);
  for (size_t i = 0; i < std::min(warnings.size(), kWarningsShown); ++i)
    out += fmt::format("warning: {}\n", warnings[i]);
  if (warnings.size() > kWarningsShown)
    out += fmt::format("warning: ... and {} more warnings\n", warnings.size() - kWarningsShown);
  return out;
}

}  // namespace biomoe
