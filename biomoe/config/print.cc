#include <fmt/format.h>

#include <algorithm>

#include "biomoe/config/config.h"
#include "biomoe/config/scalars.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

std::string_view section_of(std::string_view key) {
  const size_t dot = key.rfind('.');
  return dot == std::string_view::npos ? std::string_view{} : key.substr(0, dot);
}

std::string_view name_of(std::string_view key) {
  const size_t dot = key.rfind('.');
  return dot == std::string_view::npos ? key : key.substr(dot + 1);
}

// Control characters of a file name would end the comment that holds it.
std::string comment_of(const Origin& origin) {
  std::string text = origin.str();
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; },
      '?');
  return text;
}

// Writes the lines "section:" that lead from the open section to `next`. A section whose fields do not stand
// together would be opened twice, which YAML forbids.
class SectionWriter {
 public:
  void enter(std::string_view next, std::string& out) {
    if (next == current_) return;
    size_t depth = 0;
    for (size_t begin = 0; begin < next.size(); ++depth) {
      const size_t end = std::min(next.find('.', begin), next.size());
      const std::string path(next.substr(0, end));
      const bool open = current_ == path || current_.starts_with(path + ".");
      if (!open) {
        BM_CHECK(std::find(seen_.begin(), seen_.end(), path) == seen_.end(),
                 "the fields of section {} do not stand together in visit()", path);
        seen_.push_back(path);
        out += std::string(2 * depth, ' ') + std::string(next.substr(begin, end - begin)) + ":\n";
      }
      begin = end + 1;
    }
    current_ = next;
  }

 private:
  std::string current_;
  std::vector<std::string> seen_;
};

std::string escape_cell(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

}  // namespace

std::string print_fields(const FieldList& list, const std::vector<Origin>& origins) {
  constexpr size_t kCommentColumn = 48;
  std::string out;
  SectionWriter sections;
  for (size_t i = 0; i < list.fields().size(); ++i) {
    const Field& field = list.fields()[i];
    sections.enter(section_of(field.key), out);
    const auto depth = static_cast<size_t>(std::count(field.key.begin(), field.key.end(), '.'));
    std::string line =
        fmt::format("{}{}: {}", std::string(2 * depth, ' '), name_of(field.key), field_value(field));
    if (!origins.empty()) {
      if (line.size() < kCommentColumn) line.resize(kCommentColumn, ' ');
      line += "  # " + comment_of(origins.at(i));
    }
    out += line + '\n';
  }
  return out;
}

std::string reference_of(const FieldList& list) {
  std::string out;
  std::string section = "?";  // no section has this name
  for (const Field& field : list.fields()) {
    if (section_of(field.key) != section) {
      section = section_of(field.key);
      out += fmt::format("{}## {}\n\n", out.empty() ? "" : "\n",
                         section.empty() ? "Top level" : fmt::format("`{}`", section));
      out += "| key | type | default | meaning |\n| --- | --- | --- | --- |\n";
    }
    out += fmt::format("| `{}` | {} | `{}` | {} |\n", name_of(field.key), escape_cell(field_type(field)),
                       escape_cell(field_value(field)), escape_cell(field.help));
  }
  return out;
}

Origin origin_of(const FieldList& list, const std::vector<Origin>& origins, std::string_view key) {
  for (size_t i = 0; i < list.fields().size(); ++i) {
    if (list.fields()[i].key == key) return origins.at(i);
  }
  throw failure("the configuration has no key {}", key);
}

}  // namespace biomoe
