// What the fuzz targets of the sequence readers share: read the input twice, with buffers of different sizes,
// and stop the program when the two differ or a contract of sequence_reader.h is broken.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/error.h"
#include "biomoe/data/alphabet.h"
#include "biomoe/data/line_scanner.h"
#include "biomoe/data/record_parser.h"

namespace biomoe::fuzz {

struct Outcome : SequenceSink {
  std::vector<std::string> names;
  std::vector<std::string> sequences;
  bool open = false;
  std::string error;

  void begin_record(std::string_view name) override {
    if (open || printable_utf8(name) != name) std::abort();
    open = true;
    names.emplace_back(name);
    sequences.emplace_back();
  }
  void append(std::string_view symbols) override {
    if (!open || symbols.empty()) std::abort();
    for (const char c : symbols)
      if (c <= ' ' || c > '~') std::abort();
    sequences.back() += symbols;
  }
  void end_record() override {
    if (!open) std::abort();
    open = false;
  }
};

// `make_parser(sink)` gives the parser to test.
template <typename MakeParser>
Outcome read_with(std::string_view input, size_t buffer_bytes, MakeParser make_parser) {
  Outcome out;
  const auto source = memory_byte_source(input, "input");
  LineScanner scanner(*source, buffer_bytes);
  const std::unique_ptr<internal::RecordParser> parser = make_parser(out);
  LinePiece piece;
  try {
    while (scanner.next(piece)) {
      parser->set_line(scanner.line());
      parser->piece(piece);
    }
    parser->finish();
    if (out.open) std::abort();
  } catch (const Error& e) {
    out.error = e.what();
    if (e.kind() != ErrorKind::kUser || out.error.find('\n') != std::string::npos) std::abort();
  }
  return out;
}

template <typename MakeParser>
int compare_buffer_sizes(std::string_view input, MakeParser make_parser) {
  const Outcome whole = read_with(input, input.size() + 8, make_parser);
  const Outcome pieces = read_with(input, 7, make_parser);
  // At a fault, a piecewise reading may already have handed on the start of the faulty line.
  if (whole.error != pieces.error) std::abort();
  if (whole.error.empty() && (whole.names != pieces.names || whole.sequences != pieces.sequences))
    std::abort();
  return 0;
}

}  // namespace biomoe::fuzz
