#include "biomoe/train/tensorboard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

// TFRecord stores checksums rotated and shifted, so that a checksum of data that holds checksums stays
// useful.
uint32_t masked_crc(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8u;
}

template <typename Word>
void put_little_endian(std::string& out, Word word) {
  for (size_t i = 0; i < sizeof(Word); ++i) out += static_cast<char>((word >> (8 * i)) & 0xffu);
}

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

// Wire types of protocol buffers.
enum class Wire : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_key(std::string& out, uint64_t field, Wire wire) {
  put_varint(out, field << 3 | static_cast<uint64_t>(wire));
}

void put_bytes(std::string& out, uint64_t field, std::string_view bytes) {
  put_key(out, field, Wire::kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

// Field numbers of Event: wall_time 1 (double), step 2 (int64), file_version 3, summary 5, session_log 7.
std::string event_head(int64_t step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::string out;
  put_key(out, 1, Wire::kFixed64);
  put_little_endian(out, std::bit_cast<uint64_t>(now.count()));
  if (step != 0) {
    put_key(out, 2, Wire::kVarint);
    put_varint(out, static_cast<uint64_t>(step));
  }
  return out;
}

std::filesystem::path event_path(const std::filesystem::path& folder) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0 || host[0] == '\0') host = {"localhost"};
  return folder / fmt::format("events.out.tfevents.{}.{}.{}", seconds, host.data(), getpid());
}

void collect(const nlohmann::ordered_json& value, const std::string& tag, std::vector<Scalar>& out) {
  if (value.is_number()) {
    out.push_back({tag, value.get<double>()});
  } else if (value.is_structured()) {
    size_t index = 0;
    for (auto item = value.begin(); item != value.end(); ++item, ++index) {
      const std::string name = value.is_object() ? item.key() : std::to_string(index);
      collect(*item, tag.empty() ? name : fmt::format("{}/{}", tag, name), out);
    }
  }
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xffu];
  return ~crc;
}

std::vector<Scalar> scalars_of(const nlohmann::ordered_json& line) {
  std::vector<Scalar> out;
  for (auto item = line.begin(); item != line.end(); ++item) {
    if (item.key() != "step") collect(*item, item.key(), out);
  }
  return out;
}

EventWriter::EventWriter(const std::filesystem::path& folder, int64_t last_step) : path_(event_path(folder)) {
  file_ = Descriptor(open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file_) throw failure("{}: cannot create: {}", path_.string(), std::strerror(errno));
  std::string version = event_head(0);
  put_bytes(version, 3, "brain.Event:2");
  write_record(version);
  if (last_step > 0) {
    std::string session;  // SessionLog.status (1) = START (1)
    put_key(session, 1, Wire::kVarint);
    put_varint(session, 1);
    std::string event = event_head(last_step + 1);
    put_bytes(event, 7, session);
    write_record(event);
  }
}

void EventWriter::write(int64_t step, const std::vector<Scalar>& scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    std::string value;  // Summary.Value: tag 1, simple_value 2 (float)
    put_bytes(value, 1, scalar.tag);
    put_key(value, 2, Wire::kFixed32);
    put_little_endian(value, std::bit_cast<uint32_t>(static_cast<float>(scalar.value)));
    put_bytes(summary, 1, value);
  }
  std::string event = event_head(step);
  put_bytes(event, 5, summary);
  write_record(event);
}

void EventWriter::write_record(std::string_view payload) {
  std::string record;
  put_little_endian(record, static_cast<uint64_t>(payload.size()));
  put_little_endian(record, masked_crc(record));
  record += payload;
  put_little_endian(record, masked_crc(payload));
  if (!write_all(file_.get(), record)) {
    throw failure("{}: cannot write: {}", path_.string(), std::strerror(errno));
  }
}

}  // namespace biomoe
