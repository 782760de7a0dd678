#include "biomoe/checkpoint/hf_import.h"

#include <algorithm>
#include <cstring>

#include "biomoe/checkpoint/convert.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr size_t kBlockElements = size_t{1} << 18;

// Compares values, not bytes: the two may be stored in different types.
bool equal_values(const TensorFolder::Place& a, const TensorFolder::Place& b) {
  std::vector<float> block_a(kBlockElements), block_b(kBlockElements);
  const auto count = static_cast<size_t>(a.entry->num_elements());
  for (size_t begin = 0; begin < count; begin += kBlockElements) {
    const size_t part = std::min(kBlockElements, count - begin);
    convert_to_f32(a.entry->dtype, a.file->bytes(*a.entry).data() + begin * dtype_size(a.entry->dtype),
                   block_a.data(), part);
    convert_to_f32(b.entry->dtype, b.file->bytes(*b.entry).data() + begin * dtype_size(b.entry->dtype),
                   block_b.data(), part);
    if (std::memcmp(block_a.data(), block_b.data(), part * sizeof(float)) != 0) return false;
  }
  return true;
}

// What a rank holds of a piece of the whole model.
struct HeldPart {
  int64_t first = 0, count = 0;  // elements of the piece
  int64_t offset = 0;            // of the first, in the rank's flat arena
};

HeldPart held_part(const HfPiece& piece, const ParameterList& whole, const ParameterList& held) {
  const auto& specs = whole.specs();
  const auto parameter = std::find_if(specs.begin(), specs.end(), [&](const ParamSpec& spec) {
    return piece.offset >= spec.offset && piece.offset < spec.offset + spec.num_elements();
  });
  BM_CHECK(parameter != specs.end(), "{} is of no parameter", piece.name);
  const ParamSpec& here = held.specs().at(whole.index_of(*parameter));
  const int64_t begin = piece.offset - parameter->offset, end = begin + piece.shape.num_elements();
  const int64_t first = std::max(begin, here.first_element());
  const int64_t last = std::min(end, here.first_element() + here.num_elements());
  if (first >= last) return {};
  return {first - begin, last - first, here.offset + first - here.first_element()};
}

}  // namespace

void check_tied_head(const HfMatch& match) {
  if (!match.tied_head) return;
  for (const auto& source : match.sources) {
    const std::string& name = source.place.entry->name;
    if (name != "model.embed_tokens.weight" && name != "embed_tokens.weight") continue;
    if (!equal_values(source.place, match.tied_head)) {
      throw user_error("{}: tie_word_embeddings is true, but lm_head.weight differs from {}",
                       match.tied_head.file->name(), name);
    }
  }
}

HfImportReport import_hf(const std::filesystem::path& folder, const ModelConfig& config,
                         const ParameterList& parameters, float* arena) {
  const TensorFolder tensors(folder);
  const ParameterList whole(config);
  HfMatch match = match_hf_tensors(tensors, config, whole);
  check_tied_head(match);
  for (const auto& [piece, place] : match.sources) {
    const HeldPart part = held_part(piece, whole, parameters);
    if (part.count > 0) place.file->read_f32_part(*place.entry, part.first, part.count, arena + part.offset);
  }
  return {match.layout, static_cast<int64_t>(tensors.file_names().size()),
          static_cast<int64_t>(tensors.tensors().size()), tensors.total_bytes(), std::move(match.notes)};
}

}  // namespace biomoe
