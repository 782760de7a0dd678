// SequenceStore: random access to the bases of many records.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/data/growing_bytes.h"
#include "biomoe/data/sequence_reader.h"

namespace biomoe {

// Records are numbered from 0 in file order; lengths and offsets count bases. const members may be called
// from several threads at once.
class SequenceStore {
 public:
  virtual ~SequenceStore() = default;
  virtual int64_t num_records() const = 0;
  virtual std::string name(int64_t record) const = 0;
  virtual int64_t length(int64_t record) const = 0;
  // Copies symbols [begin, begin + count) of a record, one byte each, as the file has them (case kept).
  // Throws when the range is not inside the record.
  virtual void read(int64_t record, int64_t begin, int64_t count, uint8_t* out) const = 0;
  // Memory that the store holds. Bases that were spilled to a file do not count: the system may drop them.
  virtual size_t memory_bytes() const = 0;
};

struct StoreOptions {
  // Up to this many bases stay in memory; beyond, all go to an unlinked file that is mapped.
  int64_t memory_limit_bytes = int64_t{2} << 30;
  std::filesystem::path spill_folder;  // empty: the system's folder for temporary files
};

// Fills a store from a reader. Throws failure, with the folder named, when the spill file cannot be written,
// and user_error when the system's folder for temporary files is needed and is none.
class StoreBuilder : public SequenceSink {
 public:
  explicit StoreBuilder(StoreOptions options = {});
  ~StoreBuilder() override;
  StoreBuilder(const StoreBuilder&) = delete;
  StoreBuilder& operator=(const StoreBuilder&) = delete;

  void begin_record(std::string_view name) override;
  void append(std::string_view symbols) override;
  void end_record() override;

  int64_t num_records() const { return static_cast<int64_t>(ends_.size()); }
  int64_t num_bases() const { return bases_; }
  bool spilled() const { return spill_fd_ >= 0; }
  // The store of everything read so far; the builder is empty afterwards.
  std::unique_ptr<SequenceStore> finish();

 private:
  void flush_to_spill();

  StoreOptions options_;
  GrowingBytes memory_;  // all bases, or those not yet written to the spill file
  int spill_fd_ = -1;
  int64_t bases_ = 0;
  std::vector<int64_t> ends_;       // of each record, in bases
  std::string names_;               // back to back
  std::vector<int64_t> name_ends_;  // of each name, in bytes
};

}  // namespace biomoe
