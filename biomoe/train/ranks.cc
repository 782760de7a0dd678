#include "biomoe/train/ranks.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <thread>

#include "biomoe/config/launch.h"
#include "biomoe/core/console.h"
#include "biomoe/core/version.h"
#include "biomoe/dist/gpus.h"
#include "biomoe/dist/group_comm.h"
#include "biomoe/dist/local/local_transport.h"
#include "biomoe/dist/tcp/tcp_transport.h"
#include "biomoe/ops/device.h"

namespace biomoe {
namespace {

// Every key and its value, a line each; the number of threads may differ between hosts.
std::vector<std::string> config_lines(RunConfig& config) {
  std::vector<std::string> lines{fmt::format("the version of biomoe: {}", kVersion)};
  const FieldList list = FieldList::of(config);
  for (const Field& field : list.fields()) {
    if (field.key != "num_threads") lines.push_back(fmt::format("{}: {}", field.key, field_value(field)));
  }
  return lines;
}

std::string joined_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + '\0';
  return text;
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

tcp::Rendezvous rendezvous(const Launch& launch) {
  constexpr int64_t kLastPort = 65535;
  if (launch.host.empty() || launch.port < 1 || launch.port > kLastPort) {
    throw user_error(
        "RANK and WORLD_SIZE={} are set, and not MASTER_ADDR and MASTER_PORT with the host of rank 0 and a "
        "port there; set them (torchrun does), or unset WORLD_SIZE for a run of one rank",
        launch.processes);
  }
  if (launch.rank >= launch.processes)
    throw user_error("RANK={} is not below WORLD_SIZE={}", launch.rank, launch.processes);
  return {.rank = static_cast<int>(launch.rank),
          .size = static_cast<int>(launch.processes),
          .host = launch.host,
          .port = static_cast<int>(launch.port)};
}

std::unique_ptr<Comm> start_world(const Launch& launch, double timeout_s) {
  switch (launch.launcher) {
    case Launcher::kNone:
      return nullptr;
    case Launcher::kSrun:
      throw user_error(
          "srun started {} tasks and gave them no MPI to find each other with; start them with srun "
          "--mpi=pmix (or pmi2), or with mpirun",
          launch.processes);
    case Launcher::kTorchrun:
      return std::make_unique<GroupComm>(tcp::start(rendezvous(launch), timeout_s));
    case Launcher::kMpi:
      if (launch.processes == 1 && mpi::library().empty()) return nullptr;
      return std::make_unique<GroupComm>(mpi::start(timeout_s));
  }
  return nullptr;
}

// A rank that the launcher has bound to some of the host's processors uses those; ranks that may all use all
// of them share them out.
int64_t threads_of_rank(int64_t on_host) {
  const int64_t allowed = resolved_threads(0);
  const int64_t share = std::max<int64_t>(1, sysconf(_SC_NPROCESSORS_ONLN) / on_host);
  return std::min(allowed, share);
}

// Where the ranks of this one's host stand among all.
struct HostPlace {
  int64_t ranks = 0;  // on this host
  int64_t index = 0;  // of this one among them
};

HostPlace host_place(Comm& world) {
  const auto hosts = all_gather_text(world, host_name(), "the names of hosts");
  HostPlace place;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    if (hosts[rank] != hosts[static_cast<size_t>(world.rank())]) continue;
    if (static_cast<int>(rank) < world.rank()) ++place.index;
    ++place.ranks;
  }
  return place;
}

// Gives this rank a GPU, of its own if not `share`; "" or why there is none. A launcher that shows each rank
// one GPU has chosen it; where a rank sees several, ranks of a host take them in order.
std::string take_gpu(const HostPlace& place, bool share) {
  std::string why;
  if (!device_available(Device::kCuda, &why)) return why;
  if (nccl::library().empty()) return "this biomoe was built without NCCL";
  const int64_t count = device_count(Device::kCuda);
  if (count > 1 && count < place.ranks && !share)
    return fmt::format("{} ranks are on a host where each sees {} GPUs (see parallelism.share_gpus)",
                       place.ranks, count);
  select_device(Device::kCuda, place.index % count);
  return "";
}

// Settles device=auto: GPUs where every rank can have one, of its own if ranks are not to share them.
void settle_device(RunConfig& config, Comm& world, const HostPlace& place) {
  if (config.device == DeviceChoice::kCpu) return;
  const bool share = config.parallelism.share_gpus;
  std::string problem = take_gpu(place, share);
  const std::string own =
      problem.empty() ? host_name() + " " + device_info(Device::kCuda).bus_id : std::string();
  const auto gpus = all_gather_text(world, own, "the GPUs of ranks");
  for (size_t rank = 0; rank < gpus.size() && problem.empty() && !share; ++rank) {
    if (static_cast<int>(rank) != world.rank() && gpus[rank] == own) {
      problem = fmt::format(
          "rank {} was given the same GPU; start one rank a GPU, or set parallelism.share_gpus=true", rank);
    }
  }
  const auto problems = all_gather_text(world, problem, "the GPUs of ranks");
  const auto first =
      std::find_if(problems.begin(), problems.end(), [](const auto& text) { return !text.empty(); });
  if (first == problems.end()) {
    config.device = DeviceChoice::kCuda;
  } else if (config.device == DeviceChoice::kCuda) {
    throw user_error("rank {}: device=cuda: {}", first - problems.begin(), *first);
  } else {
    config.device = DeviceChoice::kCpu;
    if (world.rank() == 0)
      tell(stdout, "device=auto: on the CPUs, since on rank {} {}\n", first - problems.begin(), *first);
  }
}

}  // namespace

void require_same_config(Comm& world, RunConfig config) {
  const std::vector<std::string> own = config_lines(config);
  const std::string first = broadcast_text(world, joined_lines(own), 0, "the configuration of rank 0");
  std::string difference;
  for (size_t i = 0, begin = 0; i < own.size() && difference.empty(); ++i) {
    const size_t end = std::min(first.find('\0', begin), first.size());
    const std::string theirs = first.substr(begin, end - begin);
    if (theirs != own[i]) {
      difference =
          fmt::format("rank {} was started with another configuration than rank 0: {} there, {} on rank 0",
                      world.rank(), own[i], theirs);
    }
    begin = end + 1;
  }
  for (const std::string& line : all_gather_text(world, difference, "the comparison of configurations")) {
    if (!line.empty()) throw user_error("{}", line);
  }
}

Ranks start_ranks(RunConfig& config) {
  const ParallelismConfig& parallelism = config.parallelism;
  auto world = start_world(read_launch(), parallelism.timeout_s);
  if (!world) world = single_comm();
  MeshSize mesh;
  HostPlace place{.ranks = 1};
  try {
    require_same_config(*world, config);
    mesh =
        resolve_mesh(parallelism.dp_size, parallelism.ep_size, world->size(), config.model.num_local_experts);
    config.parallelism.dp_size = mesh.dp;
    if (world->size() > 1) {
      place = host_place(*world);
      settle_device(config, *world, place);
    }
  } catch (const Error& error) {
    throw error_of_rank(*world, error, parallelism.timeout_s);
  }
  if (world->size() > 1 && config.device == DeviceChoice::kCuda)
    world = nccl::over_gpus(std::move(world), parallelism.timeout_s, parallelism.share_gpus);
  Ranks ranks{Mesh(std::move(world), mesh), place.ranks, parallelism.timeout_s};
  if (!ranks.mesh.alone() && config.num_threads == 0) config.num_threads = threads_of_rank(ranks.on_host);
  return ranks;
}

void require_same(Comm& world, std::string_view what, const std::string& text) {
  const auto texts = all_gather_text(world, text, what);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    throw user_error(
        "rank {} reads other files than rank 0 for {}: {} there, {} on rank 0; give all ranks the same", rank,
        what, texts[rank], texts[0]);
  }
}

Error error_of_rank(const Comm& world, const Error& error, double timeout_s) {
  if (world.size() == 1) return error;
  if (world.rank() != 0) {
    std::signal(SIGTERM, SIG_DFL);
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(3.0, timeout_s / 3)));
  }
  const std::string text = error.what();
  if (text.starts_with("rank ")) return error;
  return Error(error.kind(), fmt::format("rank {}: {}", world.rank(), text));
}

}  // namespace biomoe
