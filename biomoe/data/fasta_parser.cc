#include "biomoe/data/record_parser.h"

namespace biomoe::internal {
namespace {

class FastaParser : public RecordParser {
 public:
  using RecordParser::RecordParser;

  void piece(const LinePiece& piece) override {
    std::string_view text = piece.text;
    if (piece.starts_line && text.starts_with('>')) {
      end_record();
      header_.clear();
      in_header_ = true;
      text.remove_prefix(1);
    }
    if (in_header_) {
      add_to_header(text, piece.ends_line);
    } else if (in_record_) {
      bases_ += append_symbols(text, SymbolSet::kSequence);
    } else if (first_visible(text) != std::string_view::npos) {
      throw error("a '>' header was expected at the start of the line");
    }
  }

  void finish() override { end_record(); }

 private:
  void add_to_header(std::string_view text, bool ends_line) {
    std::string fault;
    if (!header_.add(text, fault)) throw error("{}", fault);
    if (!ends_line) return;
    in_header_ = false;
    in_record_ = true;
    bases_ = 0;
    name_ = header_.name();
    sink_.begin_record(name_);
  }

  void end_record() {
    if (!in_record_) return;
    if (name_.empty() && bases_ == 0) throw error("a '>' above has neither a name nor a sequence");
    sink_.end_record();
    in_record_ = false;
  }

  HeaderName header_;
  std::string name_;
  int64_t bases_ = 0;
  bool in_header_ = false;
  bool in_record_ = false;
};

}  // namespace

std::unique_ptr<RecordParser> fasta_parser(const std::string& source_name, SequenceSink& sink) {
  return std::make_unique<FastaParser>(source_name, sink);
}

}  // namespace biomoe::internal
