#include "biomoe/checkpoint/hf_export.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "biomoe/checkpoint/convert.h"
#include "biomoe/checkpoint/hf_layout.h"
#include "biomoe/checkpoint/json_text.h"
#include "biomoe/checkpoint/staging_folder.h"
#include "biomoe/checkpoint/tensor_index.h"
#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBlockElements = size_t{1} << 18;

bool is_export_file(const std::string& name) {
  static const std::set<std::string> kNames{
      "config.json",    "generation_config.json", "model.safetensors.index.json",
      "tokenizer.json", "tokenizer_config.json",  "special_tokens_map.json",
      "README.md"};
  const std::string_view end = ".safetensors";
  const bool weights = name.rfind("model", 0) == 0 && name.size() > end.size() &&
                       name.compare(name.size() - end.size(), end.size(), end) == 0;
  return weights || kNames.count(name) > 0;
}

void check_destination(const fs::path& destination, const HfExportOptions& options) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(destination, error))) return;
  if (!fs::is_directory(fs::symlink_status(destination, error))) {
    throw user_error("{}: exists and is not a folder", destination.string());
  }
  const auto names = folder_names(destination);
  if (names.empty()) return;
  if (!options.overwrite) {
    throw user_error("{}: the folder is not empty; choose another, or replace an export with --overwrite",
                     destination.string());
  }
  for (const auto& name : names) {
    if (!is_export_file(name) && !options.extra_files.count(name)) {
      throw user_error("{}: holds {}, which is not part of an exported checkpoint, and is not overwritten",
                       destination.string(), quote(name));
    }
  }
}

void write_piece(const HfPiece& piece, const float* arena, DType dtype, std::vector<uint8_t>& block,
                 SafetensorsWriter& writer) {
  const auto count = static_cast<size_t>(piece.shape.num_elements());
  const float* source = arena + piece.offset;
  for (size_t begin = 0; begin < count; begin += kBlockElements) {
    const size_t part = std::min(kBlockElements, count - begin);
    if (const auto overflow = convert_from_f32(dtype, source + begin, block.data(), part)) {
      throw user_error("tensor {}: the value {} at element {} is too large for {}; export as bf16 or fp32",
                       piece.name, source[begin + *overflow], begin + *overflow, dtype_name(dtype));
    }
    writer.write(block.data(), part * dtype_size(dtype));
  }
}

}  // namespace

HfExportReport export_hf(const fs::path& given, const ModelConfig& config, const ParameterList& parameters,
                         const float* arena, const HfExportOptions& options) {
  // "out/" and "out" are one folder; the hidden one stands beside it.
  const fs::path destination = given.has_filename() ? given : given.parent_path();
  if (!is_float_type(options.dtype)) throw user_error("weights are exported as F32, BF16 or F16");
  for (const auto& [name, bytes] : options.extra_files) {
    BM_CHECK(!name.empty() && fs::path(name).filename() == name, "'{}' is not a plain file name", name);
  }
  check_destination(destination, options);
  const fs::path parent = destination.has_parent_path() ? destination.parent_path() : fs::path(".");
  std::error_code error;
  fs::create_directories(parent, error);
  if (error) throw user_error("{}: cannot create the folder: {}", parent.string(), error.message());
  remove_leftovers(parent, destination.filename().string() + ".");

  const std::vector<HfPiece> pieces = hf_pieces(parameters, HfLayout::kHub);
  std::vector<TensorSpec> specs;
  for (const auto& piece : pieces) specs.push_back({piece.name, options.dtype, piece.shape});
  std::vector<uint8_t> block(kBlockElements * sizeof(float));
  const auto source = [&](size_t i, SafetensorsWriter& writer) {
    write_piece(pieces[i], arena, options.dtype, block, writer);
  };
  StagingFolder staging(destination);
  auto files = write_tensors(staging.path(), specs, source, {.max_shard_bytes = options.max_shard_bytes});
  std::map<std::string, std::string> texts = options.extra_files;
  texts["config.json"] = hf_config_json(config, options.tokens, options.dtype).dump(2) + "\n";
  texts["generation_config.json"] = hf_generation_config_json(options.tokens).dump(2) + "\n";
  for (const auto& [name, bytes] : texts) files[name] = write_with_digest(staging.path() / name, bytes);
  staging.commit();

  HfExportReport report;
  report.files = static_cast<int64_t>(files.size());
  report.tensors = static_cast<int64_t>(pieces.size());
  for (const auto& [name, digest] : files) report.bytes += digest.bytes;
  return report;
}

uint64_t parse_byte_size(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, uint64_t>, 9> kUnits{{{"", 1},
                                                                         {"KB", 1'000},
                                                                         {"MB", 1'000'000},
                                                                         {"GB", 1'000'000'000},
                                                                         {"TB", 1'000'000'000'000},
                                                                         {"KIB", uint64_t{1} << 10},
                                                                         {"MIB", uint64_t{1} << 20},
                                                                         {"GIB", uint64_t{1} << 30},
                                                                         {"TIB", uint64_t{1} << 40}}};
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(end, text.data() + text.size());
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](char c) { return c >= 'a' && c <= 'z' ? c - 32 : c; });
  for (const auto& [name, factor] : kUnits) {
    if (error != std::errc() || unit != name || number == 0) continue;
    if (number > std::numeric_limits<int64_t>::max() / factor) break;
    return number * factor;
  }
  throw user_error("{} is not a size; write it as 5GB, 500MB, 64KiB or a number of bytes", quote(text));
}

}  // namespace biomoe
