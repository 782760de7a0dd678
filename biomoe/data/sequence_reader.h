// Streaming readers for FASTA, FASTQ and JSONL, plain or compressed.
//
// The format is told from the content: the first visible byte is '>' (FASTA), '@' (FASTQ) or '{' (JSONL).
//
// All formats. LF, CR LF and CR end a line; a UTF-8 byte-order mark is skipped; spaces and tabs inside a
// sequence are skipped; case is kept. The name of a record is the first word of its header. Malformed UTF-8
// in a name reads as '?'. Control bytes other than a tab are refused everywhere.
//
// Sequence symbols. FASTA and FASTQ: letters, '*' (stop) and '-' '.' (gap) are symbols like any other; what a
// vocabulary makes of them is its affair. Digits, other punctuation ('>' in the middle of a line is a lost
// line end) and bytes above 0x7e are refused. JSONL: any printable ASCII, since such files also hold tags.
//
// FASTA: blank lines are skipped, an empty record is a record of length 0; a '>' with neither a name nor a
// sequence is refused. FASTQ: sequence and quality may span lines, but a sequence of one line has its quality
// on one line; their lengths must agree; a name after '+' must repeat the header's. JSONL: one object a line,
// no field twice, the sequence in the string field `text_column`; the name is the first of the string fields
// "id", "name", "record", else "line_N".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "biomoe/data/byte_source.h"

namespace biomoe {

enum class SequenceFormat { kFasta, kFastq, kJsonl };
std::string_view sequence_format_name(SequenceFormat format);  // "FASTA", ...

// Receives records in order: begin_record, any number of append, end_record. Views are valid during the call.
class SequenceSink {
 public:
  virtual ~SequenceSink() = default;
  virtual void begin_record(std::string_view name) = 0;
  virtual void append(std::string_view symbols) = 0;
  virtual void end_record() = 0;
};

struct ReadOptions {
  std::string text_column = "text";
};

// Reads all of `source` into `sink`. Throws user_error with "name:line: what", one line, at the first fault
// (the sink then holds what came before it), and when there is no record at all.
SequenceFormat read_sequences(ByteSource& source, const ReadOptions& options, SequenceSink& sink);
SequenceFormat read_sequences(const std::string& path, const ReadOptions& options, SequenceSink& sink);

}  // namespace biomoe
