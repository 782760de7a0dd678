#include "biomoe/train/sanity.h"

#include <algorithm>
#include <cmath>

#include "biomoe/checkpoint/checksum.h"
#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/dist/work_together.h"
#include "biomoe/ops/device.h"

namespace biomoe {
namespace {

// Of device memory, a piece at a time.
std::string checksum(Context& ctx, const TensorView& held) {
  constexpr size_t kPiece = size_t{16} << 20;
  std::vector<unsigned char> piece(std::min(kPiece, held.bytes()));
  uint32_t crc = 0;
  for (size_t begin = 0; begin < held.bytes(); begin += kPiece) {
    const size_t count = std::min(kPiece, held.bytes() - begin);
    copy_to_host(ctx, piece.data(), static_cast<const unsigned char*>(held.data) + begin, count);
    device_wait_sync(ctx);
    crc = crc32_update(crc, piece.data(), count);
  }
  return crc32_text(crc);
}

}  // namespace

bool same_copies(Model& model, const Mesh& mesh) {
  if (mesh.alone() || model.parameters().shards()) return true;
  bool same = true;
  for (const ArenaRegion& region : model.parameters().regions()) {
    if (region.copies == 1) continue;
    const std::string own = checksum(model.context(), model.weights_A().rows(region.held, region.count));
    Comm& copies = region.experts ? mesh.dp() : mesh.world();
    for (const std::string& other : all_gather_text(copies, own, "the checksums of weights"))
      same = same && other == own;
  }
  return all_reduce_value(mesh.world(), int64_t{same ? 0 : 1}, ReduceOp::kMax, "the comparison of weights") ==
         0;
}

SanityReport check_sanity(const SanityInputs& inputs) {
  SanityReport report;
  const auto add = [&](bool good, const std::string& passed, const std::string& failed) {
    (good ? report.passed : report.failed).push_back(good ? passed : failed);
  };
  if (inputs.first_loss) {
    const double first = *inputs.first_loss, last = inputs.last_loss;
    const std::string figures =
        fmt::format("from {:.4f} to {:.4f} in {} steps{}", first, last, inputs.steps,
                    inputs.complete_before ? " when they were made; no step was made now, since the run is "
                                             "complete (in another run_dir they are "
                                             "made again)"
                                           : "");
    add(std::isfinite(last) && last < first, "the loss fell " + figures, "the loss did not fall: " + figures);
  } else {
    report.failed.push_back(
        "no step was made, and the checkpoint does not tell the loss of its first one; choose another "
        "run_dir");
  }
  const int ranks = inputs.mesh.size();
  if (inputs.model.parameters().shards()) {
    report.passed.push_back(
        fmt::format("the {} ranks keep parts of weights, of which there are no copies", ranks));
  } else if (ranks > 1) {
    add(same_copies(inputs.model, inputs.mesh),
        fmt::format("copies of weights are the same bits on all {} ranks", ranks),
        "copies of weights differ between ranks");
  }
  std::string problem = "no checkpoint was saved";
  constexpr const char* kReading = "reading the checkpoint back";
  work_together(inputs.mesh.world(), kReading, [&] {
    if (inputs.mesh.rank() != 0 || inputs.checkpoint.empty()) return;
    const VerifyResult result = verify_checkpoint(inputs.checkpoint);
    problem = result.ok() ? "" : result.problems.front();
  });
  problem = broadcast_text(inputs.mesh.world(), problem, 0, kReading);
  add(problem.empty(), "the checkpoint reads back: " + inputs.checkpoint, problem);
  return report;
}

}  // namespace biomoe
