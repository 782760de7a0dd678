// The parsers behind sequence_reader.h: each takes the pieces of lines of one format.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "biomoe/core/error.h"
#include "biomoe/data/line_scanner.h"
#include "biomoe/data/sequence_reader.h"

namespace biomoe::internal {

enum class SymbolSet { kSequence, kPrintable };

// What every format shares: the place for messages, and the check of sequence symbols.
class RecordParser {
 public:
  RecordParser(std::string source_name, SequenceSink& sink) : sink_(sink), name_(std::move(source_name)) {}
  virtual ~RecordParser() = default;
  virtual void piece(const LinePiece& piece) = 0;
  virtual void finish() = 0;
  void set_line(int64_t line) { line_ = line; }

 protected:
  // Hands the symbols of `text` to the sink and returns their number. Throws for what is no symbol.
  int64_t append_symbols(std::string_view text, SymbolSet set);

  template <typename... Args>
  [[nodiscard]] Error error(fmt::format_string<Args...> format, Args&&... args) const {
    return user_error("{}:{}: {}", name_, line_, fmt::format(format, std::forward<Args>(args)...));
  }

  int64_t line() const { return line_; }

  SequenceSink& sink_;

 private:
  std::string name_;
  std::string compacted_;
  int64_t line_ = 0;
};

// The first word of a header line that comes in pieces, without its mark.
class HeaderName {
 public:
  static constexpr size_t kMaxBytes = size_t{1} << 16;
  void clear();
  // False at a control byte or when the name exceeds kMaxBytes; `fault` then says so.
  bool add(std::string_view text, std::string& fault);
  std::string name() const;

 private:
  std::string name_;
  bool done_ = false;
};

std::unique_ptr<RecordParser> fasta_parser(const std::string& source_name, SequenceSink& sink);
std::unique_ptr<RecordParser> fastq_parser(const std::string& source_name, SequenceSink& sink);
std::unique_ptr<RecordParser> jsonl_parser(const std::string& source_name, const std::string& text_column,
                                           SequenceSink& sink);

constexpr bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\v' || c == '\f';
}
// Position of the first byte that is not blank, or npos.
inline size_t first_visible(std::string_view text) {
  return text.find_first_not_of(" \t\v\f");
}

}  // namespace biomoe::internal
