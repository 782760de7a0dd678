#include "biomoe/checkpoint/checkpoint_summary.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "biomoe/checkpoint/convert.h"
#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/checkpoint/hf_layout.h"
#include "biomoe/checkpoint/json_text.h"
#include "biomoe/checkpoint/tensor_index.h"
#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kTraining[] = "training";
constexpr char kHuggingFace[] = "huggingface";
constexpr size_t kBlockElements = size_t{1} << 18;

bool is_hf_checkpoint(const fs::path& folder) {
  std::error_code error;
  return !is_training_checkpoint(folder) && fs::exists(folder / "config.json", error);
}

json group_json(const std::string& name, const TensorFolder& folder) {
  json dtypes = json::object();
  for (const auto& [tensor, place] : folder.tensors()) {
    const std::string dtype(dtype_name(place.entry->dtype));
    dtypes[dtype] = dtypes.value(dtype, 0) + 1;
  }
  return {{"name", name},
          {"files", folder.file_names().size()},
          {"tensors", folder.tensors().size()},
          {"parameters", folder.total_elements()},
          {"bytes", folder.total_bytes()},
          {"dtypes", dtypes}};
}

json summarise_training(const fs::path& path) {
  const CheckpointHeader header = read_checkpoint_header(path);
  json summary = {{"kind", kTraining},
                  {"path", path.string()},
                  {"step", header.step},
                  {"save_index", header.save_index},
                  {"biomoe_version", header.biomoe_version},
                  {"state", header.state},
                  {"groups", json::array()},
                  {"parameters", 0},
                  {"notes", json::array()}};
  summary["state"].erase("config_yaml");
  uint64_t bytes = 0;
  for (const auto& name : header.groups) {
    const TensorFolder folder(path, name);
    bytes += folder.total_bytes();
    if (name == "model") summary["parameters"] = folder.total_elements();
    summary["groups"].push_back(group_json(name, folder));
  }
  summary["bytes"] = bytes;
  return summary;
}

json summarise_hf(const fs::path& path) {
  const HfConfig config = read_hf_config(path);
  const ParameterList parameters(config.model);
  const TensorFolder folder(path);
  const HfMatch match = match_hf_tensors(folder, config.model, parameters);
  json notes = config.notes;
  for (const auto& note : match.notes) notes.push_back(note);
  return {{"kind", kHuggingFace},
          {"path", path.string()},
          {"layout", hf_layout_name(match.layout)},
          {"sharded", folder.sharded()},
          {"config", hf_config_json(config.model, config.tokens, config.dtype.value_or(DType::kF32))},
          {"groups", json::array({group_json("model", folder)})},
          {"parameters", parameters.num_parameters()},
          {"active_parameters", parameters.num_active_parameters()},
          {"bytes", folder.total_bytes()},
          {"notes", notes}};
}

int64_t count_non_finite(const TensorFolder::Place& place) {
  std::vector<float> block(kBlockElements);
  const auto count = static_cast<size_t>(place.entry->num_elements());
  const size_t element = dtype_size(place.entry->dtype);
  const auto bytes = place.file->bytes(*place.entry);
  int64_t bad = 0;
  for (size_t begin = 0; begin < count; begin += kBlockElements) {
    const size_t part = std::min(kBlockElements, count - begin);
    convert_to_f32(place.entry->dtype, bytes.data() + begin * element, block.data(), part);
    bad +=
        std::count_if(block.data(), block.data() + part, [](float value) { return !std::isfinite(value); });
  }
  return bad;
}

void verify_hf(const fs::path& path, json& result) {
  const HfConfig config = read_hf_config(path);
  for (const auto& note : config.notes) result["notes"].push_back(note);
  const ParameterList parameters(config.model);
  const TensorFolder folder(path);
  const HfMatch match = match_hf_tensors(folder, config.model, parameters);
  for (const auto& note : match.notes) result["notes"].push_back(note);
  check_tied_head(match);
  result["files"] = folder.file_names().size();
  result["bytes"] = folder.total_bytes();
  for (const auto& source : match.sources) {
    if (const int64_t bad = count_non_finite(source.place)) {
      result["problems"].push_back(fmt::format("{}: tensor {} holds {} values that are not finite",
                                               source.place.file->name(), quote(source.place.entry->name),
                                               bad));
    }
  }
}

std::string lines_text(const json& lines, const char* label) {
  std::string text;
  for (const auto& line : lines) text += fmt::format("{}{}\n", label, line.get<std::string>());
  return text;
}

std::string size_text(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.2f} GB", bytes / 1e9);
  if (bytes >= 1e6) return fmt::format("{:.2f} MB", bytes / 1e6);
  return fmt::format("{:.0f} bytes", bytes);
}

}  // namespace

json summarise_checkpoint(const fs::path& path) {
  if (is_hf_checkpoint(path)) return summarise_hf(path);
  std::vector<std::string> warnings;
  const fs::path step = find_checkpoint(path, [&](const std::string& line) { warnings.push_back(line); });
  json summary = summarise_training(step);
  for (const auto& line : warnings) summary["notes"].push_back(line);
  return summary;
}

json verify_any_checkpoint(const fs::path& path) {
  json result = {{"kind", is_hf_checkpoint(path) ? kHuggingFace : kTraining},
                 {"path", path.string()},
                 {"ok", false},
                 {"files", 0},
                 {"bytes", 0},
                 {"problems", json::array()},
                 {"notes", json::array()}};
  std::vector<std::string> passed_over;
  try {
    if (result["kind"] == kHuggingFace) {
      verify_hf(path, result);
    } else {
      // A damaged step folder named as such is to be checked, not passed over; of a run, those passed over
      // are what is to be told.
      const bool is_step = path.filename().string().rfind("step_", 0) == 0;
      const fs::path step =
          is_step ? path
                  : find_checkpoint(path, [&](const std::string& line) { passed_over.push_back(line); });
      const VerifyResult checked = verify_checkpoint(step);
      if (passed_over.empty()) result["path"] = step.string();
      result["files"] = checked.files;
      result["bytes"] = checked.bytes;
      result["problems"] = checked.problems;
    }
  } catch (const Error& error) {
    result["problems"].push_back(error.what());
  }
  for (const auto& line : passed_over) result["problems"].push_back(line);
  result["ok"] = result["problems"].empty();
  return result;
}

std::string summary_text(const json& summary) {
  std::string text = fmt::format("{}: {} checkpoint\n", summary.at("path").get<std::string>(),
                                 summary.at("kind").get<std::string>());
  if (summary.at("kind") == kTraining) {
    text +=
        fmt::format("step        {} (save {}, by biomoe {})\n", summary.at("step").get<int64_t>(),
                    summary.at("save_index").get<int64_t>(), summary.at("biomoe_version").get<std::string>());
  } else {
    text += fmt::format("layout      {}{}\n", summary.at("layout").get<std::string>(),
                        summary.at("sharded").get<bool>() ? ", sharded" : "");
  }
  text += fmt::format("parameters  {}\n", summary.at("parameters").get<int64_t>());
  if (summary.contains("active_parameters")) {
    text += fmt::format("active      {} a token\n", summary.at("active_parameters").get<int64_t>());
  }
  for (const auto& group : summary.at("groups")) {
    std::string dtypes;
    for (const auto& [name, count] : group.at("dtypes").items()) {
      dtypes += fmt::format("{}{} {}", dtypes.empty() ? "" : ", ", count.get<int64_t>(), name);
    }
    text +=
        fmt::format("{:<11} {} tensors ({}), {} in {} file{}\n", group.at("name").get<std::string>(),
                    group.at("tensors").get<int64_t>(), dtypes, size_text(group.at("bytes").get<double>()),
                    group.at("files").get<int64_t>(), group.at("files") == 1 ? "" : "s");
  }
  return text + lines_text(summary.at("notes"), "note: ");
}

std::string verify_text(const json& result) {
  const bool ok = result.at("ok").get<bool>();
  return lines_text(result.at("notes"), "note: ") + lines_text(result.at("problems"), "problem: ") +
         fmt::format("{}: {} ({} files, {} checked)\n", result.at("path").get<std::string>(),
                     ok ? "sound" : "NOT sound", result.at("files").get<int64_t>(),
                     size_text(result.at("bytes").get<double>()));
}

}  // namespace biomoe
