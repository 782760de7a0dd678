#include "biomoe/data/alphabet.h"
#include "biomoe/data/record_parser.h"

namespace biomoe::internal {
namespace {

// Format: Cock et al., "The Sanger FASTQ file format", Nucleic Acids Research 38 (2010).
class FastqParser : public RecordParser {
 public:
  using RecordParser::RecordParser;

  void piece(const LinePiece& piece) override {
    switch (state_) {
      case State::kBetween:
        return between(piece);
      case State::kHeader:
        return header(piece.text, piece.ends_line);
      case State::kSequence:
        return sequence(piece);
      case State::kPlus:
        return plus(piece.text, piece.ends_line);
      case State::kQuality:
        return quality(piece);
    }
  }

  void finish() override {
    if (state_ == State::kSequence) throw error("record '{}' is cut short: no '+' line", shortened(name_));
    if (state_ == State::kQuality) throw quality_mismatch();
  }

 private:
  enum class State { kBetween, kHeader, kSequence, kPlus, kQuality };

  void between(const LinePiece& piece) {
    const size_t visible = first_visible(piece.text);
    if (visible == std::string_view::npos) return;
    if (!piece.starts_line || piece.text[0] != '@')
      throw error("a FASTQ record starts with '@' at the start of the line; this starts with {}{}",
                  describe_symbol(static_cast<uint8_t>(piece.text[visible])),
                  name_.empty() ? "" : " (is the quality above longer than its sequence?)");
    header_.clear();
    state_ = State::kHeader;
    header(piece.text.substr(1), piece.ends_line);
  }

  void header(std::string_view text, bool ends_line) {
    std::string fault;
    if (!header_.add(text, fault)) throw error("{}", fault);
    if (!ends_line) return;
    name_ = header_.name();
    bases_ = qualities_ = sequence_lines_ = 0;
    sink_.begin_record(name_);
    state_ = State::kSequence;
  }

  void sequence(const LinePiece& piece) {
    if (piece.starts_line && piece.text.starts_with('+')) {
      header_.clear();
      state_ = State::kPlus;
      return plus(piece.text.substr(1), piece.ends_line);
    }
    if (piece.starts_line && piece.text.starts_with('@'))
      throw error("record '{}' has no '+' line before the next '@'", shortened(name_));
    const int64_t added = append_symbols(piece.text, SymbolSet::kSequence);
    bases_ += added;
    if (piece.starts_line) line_counted_ = false;
    if (added > 0 && !line_counted_) {
      ++sequence_lines_;
      line_counted_ = true;
    }
  }

  void plus(std::string_view text, bool ends_line) {
    std::string fault;
    if (!header_.add(text, fault)) throw error("{}", fault);
    if (!ends_line) return;
    const std::string repeated = header_.name();
    if (!repeated.empty() && repeated != name_)
      throw error("'+{}' does not repeat the name '{}' of its record", shortened(repeated), shortened(name_));
    state_ = State::kQuality;
    if (bases_ == 0) end_record();
  }

  void quality(const LinePiece& piece) {
    for (const char c : piece.text)
      if (c <= ' ' || c > '~')
        throw error("{} in the quality of record '{}'", describe_symbol(static_cast<uint8_t>(c)),
                    shortened(name_));
    qualities_ += static_cast<int64_t>(piece.text.size());
    if (!piece.ends_line) return;
    if (qualities_ > bases_ || (qualities_ < bases_ && sequence_lines_ <= 1)) throw quality_mismatch();
    if (qualities_ == bases_) end_record();
  }

  void end_record() {
    sink_.end_record();
    state_ = State::kBetween;
  }

  [[nodiscard]] Error quality_mismatch() const {
    return error("record '{}' has {} quality values for {} bases", shortened(name_), qualities_, bases_);
  }

  State state_ = State::kBetween;
  HeaderName header_;
  std::string name_;
  int64_t bases_ = 0;
  int64_t qualities_ = 0;
  int64_t sequence_lines_ = 0;  // that hold a symbol
  bool line_counted_ = false;
};

}  // namespace

std::unique_ptr<RecordParser> fastq_parser(const std::string& source_name, SequenceSink& sink) {
  return std::make_unique<FastqParser>(source_name, sink);
}

}  // namespace biomoe::internal
