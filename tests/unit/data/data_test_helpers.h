// Shared by the tests of biomoe/data.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/error.h"
#include "biomoe/core/rng.h"
#include "biomoe/data/sequence_reader.h"
#include "biomoe/data/sequence_store.h"
#include "tests/test_folder.h"

namespace biomoe::test {

// Keeps what a reader reports.
struct Collected : SequenceSink {
  std::vector<std::string> names;
  std::vector<std::string> sequences;
  int64_t ended = 0;
  void begin_record(std::string_view name) override {
    names.emplace_back(name);
    sequences.emplace_back();
  }
  void append(std::string_view symbols) override { sequences.back() += symbols; }
  void end_record() override { ++ended; }
};

// Records given as text.
class TextStore : public SequenceStore {
 public:
  explicit TextStore(std::vector<std::string> records) : records_(std::move(records)) {}
  int64_t num_records() const override { return static_cast<int64_t>(records_.size()); }
  std::string name(int64_t record) const override { return fmt::format("r{}", record); }
  int64_t length(int64_t record) const override { return static_cast<int64_t>(at(record).size()); }
  size_t memory_bytes() const override { return 0; }
  void read(int64_t record, int64_t begin, int64_t count, uint8_t* out) const override {
    BM_CHECK(begin >= 0 && count >= 0 && begin + count <= length(record), "[{}, {}) of record {}", begin,
             begin + count, record);
    const std::string& bases = at(record);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(bases[static_cast<size_t>(begin + i)]);
  }

 private:
  const std::string& at(int64_t record) const { return records_.at(static_cast<size_t>(record)); }
  std::vector<std::string> records_;
};

// Records of any length that cost no memory: base i is drawn from i.
class SyntheticStore : public SequenceStore {
 public:
  explicit SyntheticStore(std::vector<int64_t> lengths) : lengths_(std::move(lengths)) {}
  static uint8_t base(int64_t record, int64_t i) {
    const Rng rng(static_cast<uint64_t>(record), RngStream::kTest);
    return static_cast<uint8_t>("ACGT"[rng.u64(static_cast<uint64_t>(i)) & 3]);
  }
  int64_t num_records() const override { return static_cast<int64_t>(lengths_.size()); }
  std::string name(int64_t record) const override { return fmt::format("s{}", record); }
  int64_t length(int64_t record) const override { return lengths_.at(static_cast<size_t>(record)); }
  size_t memory_bytes() const override { return 0; }
  void read(int64_t record, int64_t begin, int64_t count, uint8_t* out) const override {
    BM_CHECK(begin >= 0 && count >= 0 && begin + count <= length(record), "[{}, {}) of record {}", begin,
             begin + count, record);
    for (int64_t i = 0; i < count; ++i) out[i] = base(record, begin + i);
  }

 private:
  std::vector<int64_t> lengths_;
};

// The message of the Error that `call` throws, "" when it throws none.
template <typename Call>
std::string error_of(Call call, ErrorKind* kind = nullptr) {
  try {
    call();
  } catch (const Error& e) {
    if (kind != nullptr) *kind = e.kind();
    return e.what();
  }
  return {};
}

inline bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

}  // namespace biomoe::test
