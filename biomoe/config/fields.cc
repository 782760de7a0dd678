#include "biomoe/config/fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <type_traits>

#include "biomoe/core/error.h"

namespace biomoe {

void FieldList::add(std::string_view key, FieldRef ref, std::string_view help) {
  std::string full = prefix_ + std::string(key);
  for (const Field& field : fields_) {
    BM_CHECK(field.key != full, "the configuration key {} is declared twice", full);
  }
  fields_.push_back({std::move(full), std::string(help), ref});
}

size_t FieldList::enter(std::string_view key) {
  const size_t outer = prefix_.size();
  prefix_ += key;
  sections_.push_back(prefix_);
  prefix_ += '.';
  return outer;
}

namespace {

constexpr std::string_view kMandatory = "???";  // as OmegaConf writes a value that the user has to give

std::string join_or(std::span<const std::string_view> names) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) out += i + 1 == names.size() ? " or " : ", ";
    out += names[i];
  }
  return out;
}

template <typename T>
T read_scalar(const ConfigValue& value) {
  if constexpr (std::is_same_v<T, bool>) return read_bool(value);
  if constexpr (std::is_same_v<T, int64_t>) return read_integer(value);
  if constexpr (std::is_same_v<T, double>) return read_number(value);
  if constexpr (std::is_same_v<T, std::string>) return read_text(value);
}

struct Assign {
  ConfigValue value;

  template <typename T>
  void operator()(T* member) const {
    *member = read_scalar<T>(value);
  }
  template <typename T>
  void operator()(std::optional<T>* member) const {
    if (value.node.kind == ConfigNode::Kind::kNull) {
      member->reset();
    } else {
      *member = read_scalar<T>(value);
    }
  }
  // A single value stands for a list of one, null for the empty list.
  template <typename T>
  void operator()(std::vector<T>* member) const {
    std::vector<T> items;
    if (value.node.kind == ConfigNode::Kind::kScalar) {
      items.push_back(read_scalar<T>(value));
    } else if (value.node.kind == ConfigNode::Kind::kMap) {
      refuse_value(value, "a list is expected, not a section with keys of its own; write [a, b]");
    } else {
      for (const ConfigNode& item : value.node.items) {
        items.push_back(read_scalar<T>(ConfigValue{item, value.key}));
      }
    }
    *member = std::move(items);
  }
  void operator()(const ChoiceRef& choice) const {
    choice.set(choice.member, choice_index(value, choice.names));
  }
};

bool is_mandatory(const ConfigNode& node) {
  return node.kind == ConfigNode::Kind::kScalar && node.text == kMandatory;
}

// Walks the tree beside the list of fields.
class Reader {
 public:
  explicit Reader(const FieldList& list) : list_(list), origins_(list.fields().size()) {}

  std::vector<Origin> read(const ConfigNode& tree) {
    read_map(tree, "");
    for (size_t i = 0; i < origins_.size(); ++i) require_given(i);
    return std::move(origins_);
  }

 private:
  void read_map(const ConfigNode& map, const std::string& prefix) {
    for (const auto& [name, node] : map.entries) {
      const std::string key = prefix + name;
      const auto& sections = list_.sections();
      // A key of a file may itself hold dots; only its own parts lead into a section.
      const bool plain = name.find('.') == std::string::npos;
      const auto field = std::find_if(list_.fields().begin(), list_.fields().end(),
                                      [&](const Field& candidate) { return plain && candidate.key == key; });
      if (plain && std::find(sections.begin(), sections.end(), key) != sections.end()) {
        read_section(node, key);
      } else if (field != list_.fields().end()) {
        read_field(node, static_cast<size_t>(field - list_.fields().begin()));
      } else {
        refuse_unknown(node, prefix, name);
      }
    }
  }

  void read_section(const ConfigNode& node, const std::string& key) {
    if (node.kind == ConfigNode::Kind::kMap) {
      read_map(node, key + ".");
    } else if (node.kind != ConfigNode::Kind::kNull) {
      refuse_value({node, key}, fmt::format("is a section, not a value; set one of its keys: {}",
                                            joined(children(key + "."), ", ")));
    }
  }

  void read_field(const ConfigNode& node, size_t index) {
    const Field& field = list_.fields()[index];
    origins_[index] = node.origin;
    // ??? in a base file is a hole that a later file or the command line fills; here nothing did.
    const bool hole = is_mandatory(node) || (node.kind == ConfigNode::Kind::kList && node.items.size() == 1 &&
                                             is_mandatory(node.items[0]));
    if (hole) refuse_hole(node.origin, field.key);
    std::visit(Assign{{node, field.key}}, field.ref);
  }

  [[noreturn]] void refuse_hole(const Origin& origin, const std::string& key) const {
    throw user_error("{}: {}: has to be given; add {}=VALUE to the command line or set it in the file",
                     origin.str(), key, key);
  }

  // A member whose default is ??? and that no file and no argument sets.
  void require_given(size_t index) const {
    if (origins_[index].kind != Origin::Kind::kDefault) return;
    const Field& field = list_.fields()[index];
    const auto* text = std::get_if<std::string*>(&field.ref);
    const auto* list = std::get_if<std::vector<std::string>*>(&field.ref);
    const bool hole =
        (text && **text == kMandatory) || (list && (**list).size() == 1 && (**list).front() == kMandatory);
    if (hole) refuse_hole(origins_[index], field.key);
  }

  // Names of the fields and sections right below `prefix`.
  std::vector<std::string> children(const std::string& prefix) const {
    std::vector<std::string> names;
    const auto add = [&](const std::string& key) {
      if (key.starts_with(prefix) && key.find('.', prefix.size()) == std::string::npos) {
        names.push_back(key.substr(prefix.size()));
      }
    };
    for (const Field& field : list_.fields()) add(field.key);
    for (const std::string& section : list_.sections()) add(section);
    return names;
  }

  // The nearest name in the same section, else the same name in another section.
  std::string suggestion(const std::string& prefix, const std::string& name) const {
    const std::string sibling = nearest(name, children(prefix));
    if (!sibling.empty()) return prefix + sibling;
    for (const Field& field : list_.fields()) {
      if (field.key == name || field.key.ends_with("." + name)) return field.key;
    }
    return {};
  }

  [[noreturn]] void refuse_unknown(const ConfigNode& node, const std::string& prefix,
                                   const std::string& name) const {
    const std::string near = suggestion(prefix, name);
    const std::string key = prefix + name;
    const std::string place = is_clean(key) ? key : shown(key);
    if (near == key) {
      throw user_error("{}: {}: a key with dots is not read from a file; nest it: a section, then its keys",
                       node.origin.str(), place);
    }
    if (!near.empty()) {
      throw user_error("{}: {}: unknown key; did you mean {}?", node.origin.str(), place, near);
    }
    throw user_error("{}: {}: unknown key; {} has {}", node.origin.str(), place,
                     prefix.empty() ? "the top level" : prefix.substr(0, prefix.size() - 1),
                     joined(children(prefix), ", "));
  }

  static bool is_clean(const std::string& key) {
    return key.size() <= 60 &&
           std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c != 0x7f; });
  }

  const FieldList& list_;
  std::vector<Origin> origins_;
};

struct TypeName {
  std::string operator()(bool*) const { return "true or false"; }
  std::string operator()(int64_t*) const { return "integer"; }
  std::string operator()(double*) const { return "number"; }
  std::string operator()(std::string*) const { return "text"; }
  std::string operator()(std::vector<std::string>*) const { return "list of text"; }
  std::string operator()(std::vector<double>*) const { return "list of numbers"; }
  std::string operator()(std::optional<bool>*) const { return "true, false or null"; }
  std::string operator()(std::optional<int64_t>*) const { return "integer or null"; }
  std::string operator()(std::optional<double>*) const { return "number or null"; }
  std::string operator()(std::optional<std::string>*) const { return "text or null"; }
  std::string operator()(const ChoiceRef& choice) const { return join_or(choice.names); }
};

struct Print {
  std::string operator()(const bool* value) const { return *value ? "true" : "false"; }
  std::string operator()(const int64_t* value) const { return std::to_string(*value); }
  std::string operator()(const double* value) const { return yaml_number(*value); }
  std::string operator()(const std::string* value) const { return yaml_text(*value); }
  template <typename T>
  std::string operator()(const std::optional<T>* value) const {
    return *value ? (*this)(&**value) : "null";
  }
  template <typename T>
  std::string operator()(const std::vector<T>* value) const {
    std::vector<std::string> items;
    for (const T& item : *value) items.push_back((*this)(&item));
    return fmt::format("[{}]", joined(items, ", "));
  }
  std::string operator()(const ChoiceRef& choice) const {
    const size_t index = choice.get(choice.member);
    BM_CHECK(index < choice.names.size(), "value {} of a choice has no name", index);
    return yaml_text(std::string(choice.names[index]));
  }
};

}  // namespace

size_t choice_index(const ConfigValue& value, std::span<const std::string_view> names) {
  const std::string text = read_text(value);
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    const std::string near = nearest(text, {names.begin(), names.end()});
    refuse_value(value, fmt::format("{} is expected, not {}{}", join_or(names), shown(text),
                                    near.empty() ? "" : "; did you mean " + near + "?"));
  }
  return static_cast<size_t>(found - names.begin());
}

std::vector<Origin> read_fields(const FieldList& list, const ConfigNode& tree) {
  return Reader(list).read(tree);
}

std::string field_type(const Field& field) {
  return std::visit(TypeName{}, field.ref);
}

std::string field_value(const Field& field) {
  return std::visit([](const auto& ref) { return Print{}(ref); }, field.ref);
}

}  // namespace biomoe
