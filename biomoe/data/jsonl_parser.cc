#include <nlohmann/json.hpp>
#include <set>

#include "biomoe/data/alphabet.h"
#include "biomoe/data/record_parser.h"

namespace biomoe::internal {
namespace {

using nlohmann::json;

constexpr size_t kMaxLineBytes = size_t{1} << 31;  // a line is held whole, unlike in the other formats

class JsonlParser : public RecordParser {
 public:
  JsonlParser(const std::string& source_name, std::string text_column, SequenceSink& sink)
      : RecordParser(source_name, sink), text_column_(std::move(text_column)) {}

  void piece(const LinePiece& piece) override {
    if (piece.starts_line) {
      buffer_.clear();
      if (piece.ends_line) return record(piece.text);
    }
    if (buffer_.size() + piece.text.size() > kMaxLineBytes)
      throw error("a line of more than {} bytes; split the record", kMaxLineBytes);
    buffer_ += piece.text;
    if (piece.ends_line) record(buffer_);
  }

  void finish() override {}

 private:
  void record(std::string_view line) {
    if (first_visible(line) == std::string_view::npos) return;
    json object;
    try {
      object = parse_object(line);
    } catch (const json::parse_error& e) {
      throw error("not valid JSON at byte {} of the line", e.byte);
    } catch (const json::exception&) {  // a number beyond every type, for one
      throw error("not valid JSON");
    }
    if (!object.is_object()) throw error("a JSON object was expected, not {}", object.type_name());
    const auto text = object.find(text_column_);
    if (text == object.end())
      throw error(
          "no field \"{}\"; name the field that holds the sequence: dataset.text_column, or --text-column",
          text_column_);
    if (!text->is_string())
      throw error("the field \"{}\" is a {}, not a string", text_column_, text->type_name());
    sink_.begin_record(record_name(object));
    append_lines(text->get_ref<const std::string&>());
    sink_.end_record();
  }

  // The parser alone would keep the last of two fields with one name.
  json parse_object(std::string_view line) const {
    std::set<std::string> keys;
    std::string repeated;
    const auto note_key = [&](int depth, json::parse_event_t event, json& parsed) {
      if (event == json::parse_event_t::key && depth == 1 && !keys.insert(parsed.get<std::string>()).second)
        repeated = parsed.get<std::string>();
      return true;
    };
    json object = json::parse(line, note_key);
    if (!repeated.empty()) throw error("the field \"{}\" is given twice; keep one", shortened(repeated));
    return object;
  }

  // A sequence in JSON may hold escaped line ends; they are layout, as in FASTA.
  void append_lines(std::string_view text) {
    while (true) {
      const size_t stop = text.find_first_of("\r\n");
      append_symbols(text.substr(0, stop), SymbolSet::kPrintable);
      if (stop == std::string_view::npos) return;
      text.remove_prefix(stop + 1);
    }
  }

  std::string record_name(const json& object) const {
    for (const char* key : {"id", "name", "record"}) {
      const auto field = object.find(key);
      if (field == object.end() || !field->is_string() || key == text_column_) continue;
      HeaderName name;
      std::string fault;
      if (!name.add(field->get_ref<const std::string&>(), fault)) throw error("{}", fault);
      if (!name.name().empty()) return name.name();
    }
    return fmt::format("line_{}", line());
  }

  std::string text_column_;
  std::string buffer_;
};

}  // namespace

std::unique_ptr<RecordParser> jsonl_parser(const std::string& source_name, const std::string& text_column,
                                           SequenceSink& sink) {
  return std::make_unique<JsonlParser>(source_name, text_column, sink);
}

}  // namespace biomoe::internal
