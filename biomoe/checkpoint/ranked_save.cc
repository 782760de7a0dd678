#include "biomoe/checkpoint/ranked_save.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "biomoe/checkpoint/tensor_index.h"
#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"
#include "biomoe/dist/work_together.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFirst = 0;  // the rank that makes and finishes the folder

// A file of the checkpoint, as all ranks work it out for themselves.
struct SharedFile {
  std::string name;
  std::string head;
  uint64_t bytes = 0;
};

// Where a tensor's data begin.
struct DataPlace {
  size_t file = 0;
  uint64_t begin = 0;
};

struct Layout {
  std::vector<SharedFile> files;
  std::vector<std::vector<DataPlace>> places;  // by group and tensor
};

// Bytes of a file that one rank wrote.
struct WrittenPart {
  size_t file = 0;
  uint64_t begin = 0, bytes = 0;
  uint32_t crc32 = 0;
};

WriteTensorsOptions write_options(const CheckpointStore& store, const TensorGroup& group) {
  return {.stem = group.name, .max_shard_bytes = store.options().max_shard_bytes};
}

Layout lay_out(const CheckpointStore& store, const std::vector<TensorGroup>& groups) {
  Layout layout;
  for (const TensorGroup& group : groups) {
    const std::vector<TensorSpec> specs = tensor_specs(group);
    const WriteTensorsOptions options = write_options(store, group);
    auto& places = layout.places.emplace_back(specs.size());
    for (const ShardPlan& shard : plan_shards(specs, options)) {
      const std::vector<TensorSpec> held(specs.begin() + static_cast<std::ptrdiff_t>(shard.begin),
                                         specs.begin() + static_cast<std::ptrdiff_t>(shard.end));
      SharedFile file{.name = shard.name, .head = safetensors_head(held, options.metadata)};
      file.bytes = file.head.size();
      for (size_t i = shard.begin; i < shard.end; ++i) {
        places[i] = {layout.files.size(), file.bytes};
        file.bytes += specs[i].bytes();
      }
      layout.files.push_back(std::move(file));
    }
  }
  return layout;
}

[[noreturn]] void refuse(const fs::path& path, const char* what) {
  throw failure("{}: cannot {}: {}", path.string(), what, std::strerror(errno));
}

void create_files(const fs::path& folder, const Layout& layout) {
  for (const SharedFile& file : layout.files) {
    const fs::path path = folder / file.name;
    const Descriptor opened(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!opened) refuse(path, "create");
    if (ftruncate(opened.get(), static_cast<off_t>(file.bytes)) != 0) refuse(path, "set the size");
    if (!write_all(opened.get(), file.head)) refuse(path, "write");
    if (fsync(opened.get()) != 0) refuse(path, "fsync");
  }
}

void write_at(int fd, const fs::path& path, uint64_t place, const void* data, uint64_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done =
        pwrite(fd, from, std::min<uint64_t>(bytes, uint64_t{1} << 30), static_cast<off_t>(place));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) refuse(path, "write");
    from += done;
    place += static_cast<uint64_t>(done);
    bytes -= static_cast<uint64_t>(done);
  }
}

// This rank's parts, file by file.
std::vector<WrittenPart> write_parts(const fs::path& folder, const Layout& layout,
                                     const std::vector<TensorGroup>& groups) {
  std::vector<WrittenPart> written;
  for (size_t number = 0; number < layout.files.size(); ++number) {
    const fs::path path = folder / layout.files[number].name;
    Descriptor file;
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t t = 0; t < groups[g].tensors.size(); ++t) {
        const NamedTensor& tensor = groups[g].tensors[t];
        const DataPlace& place = layout.places[g][t];
        if (place.file != number || tensor.view.num_elements() == 0) continue;
        if (!file) file = Descriptor(open(path.c_str(), O_WRONLY | O_CLOEXEC));
        if (!file) refuse(path, "open (is the folder on a file system that all hosts share?)");
        WrittenPart part{.file = number, .bytes = tensor.view.bytes()};
        part.begin =
            place.begin + static_cast<uint64_t>(tensor.first_element()) * dtype_size(tensor.view.dtype);
        part.crc32 = crc32_update(0, tensor.view.data, part.bytes);
        write_at(file.get(), path, part.begin, tensor.view.data, part.bytes);
        written.push_back(part);
      }
    }
    if (file && fsync(file.get()) != 0) refuse(path, "fsync");
    if (file && file.close_now() != 0) refuse(path, "close");
  }
  return written;
}

std::string to_text(const std::vector<WrittenPart>& parts) {
  json list = json::array();
  for (const WrittenPart& part : parts) list.push_back({part.file, part.begin, part.bytes, part.crc32});
  return list.dump();
}

// The digests of whole files. failure when the parts leave a gap or overlap.
std::map<std::string, FileDigest> join(const Layout& layout, const std::vector<std::string>& texts) {
  std::vector<WrittenPart> parts;
  for (size_t i = 0; i < layout.files.size(); ++i) {
    const std::string& head = layout.files[i].head;
    parts.push_back({i, 0, head.size(), crc32_update(0, head.data(), head.size())});
  }
  for (const std::string& text : texts) {
    for (const json& part : json::parse(text))
      parts.push_back(
          {part[0].get<size_t>(), part[1].get<uint64_t>(), part[2].get<uint64_t>(), part[3].get<uint32_t>()});
  }
  std::sort(parts.begin(), parts.end(), [](const WrittenPart& a, const WrittenPart& b) {
    return std::pair(a.file, a.begin) < std::pair(b.file, b.begin);
  });
  std::map<std::string, FileDigest> digests;
  for (const WrittenPart& part : parts) {
    FileDigest& digest = digests[layout.files[part.file].name];
    BM_CHECK(part.begin == digest.bytes, "{}: the ranks' parts leave byte {} or write it twice",
             layout.files[part.file].name, std::min(part.begin, digest.bytes));
    digest.crc32 = digest.bytes == 0 ? part.crc32 : crc32_joined(digest.crc32, part.crc32, part.bytes);
    digest.bytes += part.bytes;
  }
  for (const SharedFile& file : layout.files)
    BM_CHECK(digests[file.name].bytes == file.bytes, "{}: no rank wrote its end", file.name);
  return digests;
}

// The digests of all files of the groups, with those that name the shards, which are written here.
std::map<std::string, FileDigest> whole_files(const CheckpointStore& store, const fs::path& into,
                                              const Layout& layout, const std::vector<TensorGroup>& groups,
                                              const std::vector<std::string>& parts) {
  auto digests = join(layout, parts);
  for (const TensorGroup& group : groups) {
    const auto specs = tensor_specs(group);
    const auto options = write_options(store, group);
    digests.merge(write_shard_index(into, specs, plan_shards(specs, options), options));
  }
  return digests;
}

}  // namespace

SaveReport save_from_ranks(const CheckpointStore& store, Comm& ranks, int64_t step,
                           const std::vector<TensorGroup>& groups, const json& state) {
  const Layout layout = lay_out(store, groups);
  const bool first = ranks.rank() == kFirst;
  std::optional<CheckpointSave> save;  // of the first rank
  try {
    work_together(ranks, "making the folder of the checkpoint", [&] {
      if (!first) return;
      save.emplace(store, step);
      create_files(save->folder(), layout);
    });
    const fs::path into =
        broadcast_text(ranks, first ? save->folder().string() : "", kFirst, "the folder of the checkpoint");
    std::vector<WrittenPart> parts;
    work_together(ranks, "writing the checkpoint", [&] { parts = write_parts(into, layout, groups); });
    const auto texts = all_gather_text(ranks, to_text(parts), "the checksums of the checkpoint");
    work_together(ranks, "finishing the checkpoint", [&] {
      if (first) save->commit(groups, whole_files(store, into, layout, groups, texts), state);
    });
  } catch (const Error& error) {
    throw checkpoint_not_saved(store.step_path(step), error);
  }
  SaveReport report{.step = step, .path = store.step_path(step)};
  work_together(ranks, "removing old checkpoints", [&] {
    if (first) report = save->publish();
  });
  return report;
}

}  // namespace biomoe
