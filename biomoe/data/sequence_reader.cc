#include "biomoe/data/sequence_reader.h"

#include "biomoe/data/alphabet.h"
#include "biomoe/data/record_parser.h"

namespace biomoe {
namespace {

struct CountingSink : SequenceSink {
  explicit CountingSink(SequenceSink& target) : inner(target) {}
  void begin_record(std::string_view name) override {
    ++records;
    inner.begin_record(name);
  }
  void append(std::string_view symbols) override { inner.append(symbols); }
  void end_record() override { inner.end_record(); }
  SequenceSink& inner;
  int64_t records = 0;
};

SequenceFormat format_of(char first, const ByteSource& source, int64_t line) {
  switch (first) {
    case '>':
      return SequenceFormat::kFasta;
    case '@':
      return SequenceFormat::kFastq;
    case '{':
      return SequenceFormat::kJsonl;
    default:
      throw user_error("{}:{}: {} where '>' (FASTA), '@' (FASTQ) or '{{' (JSONL) was expected", source.name(),
                       line, describe_symbol(static_cast<uint8_t>(first)));
  }
}

std::unique_ptr<internal::RecordParser> make_parser(SequenceFormat format, const ByteSource& source,
                                                    const ReadOptions& options, SequenceSink& sink) {
  switch (format) {
    case SequenceFormat::kFasta:
      return internal::fasta_parser(source.name(), sink);
    case SequenceFormat::kFastq:
      return internal::fastq_parser(source.name(), sink);
    case SequenceFormat::kJsonl:
      break;
  }
  return internal::jsonl_parser(source.name(), options.text_column, sink);
}

}  // namespace

std::string_view sequence_format_name(SequenceFormat format) {
  switch (format) {
    case SequenceFormat::kFasta:
      return "FASTA";
    case SequenceFormat::kFastq:
      return "FASTQ";
    case SequenceFormat::kJsonl:
      break;
  }
  return "JSONL";
}

SequenceFormat read_sequences(ByteSource& source, const ReadOptions& options, SequenceSink& sink) {
  LineScanner scanner(source);
  CountingSink counter(sink);
  std::unique_ptr<internal::RecordParser> parser;
  SequenceFormat format = SequenceFormat::kFasta;
  LinePiece piece;
  while (scanner.next(piece)) {
    if (!parser) {
      const size_t visible = internal::first_visible(piece.text);
      if (visible == std::string_view::npos) continue;
      format = format_of(piece.text[visible], source, scanner.line());
      parser = make_parser(format, source, options, counter);
    }
    parser->set_line(scanner.line());
    parser->piece(piece);
  }
  if (parser) parser->finish();
  if (counter.records == 0) throw user_error("{}: holds no sequence record", source.name());
  return format;
}

SequenceFormat read_sequences(const std::string& path, const ReadOptions& options, SequenceSink& sink) {
  const std::unique_ptr<ByteSource> source = open_byte_source(path);
  return read_sequences(*source, options, sink);
}

}  // namespace biomoe
