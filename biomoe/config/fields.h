// FieldList: the keys of a configuration struct, gathered through its visit(), with typed pointers to the
// members. Reading, printing and documenting a configuration all work on this list.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "biomoe/config/node.h"
#include "biomoe/config/scalars.h"

namespace biomoe {

// An enum member and the names of its values, in their numeric order from 0.
struct ChoiceRef {
  std::span<const std::string_view> names;
  void* member;
  size_t (*get)(const void* member);
  void (*set)(void* member, size_t value);
};

using FieldRef = std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*,
                              std::vector<double>*, std::optional<bool>*, std::optional<int64_t>*,
                              std::optional<double>*, std::optional<std::string>*, ChoiceRef>;

struct Field {
  std::string key;  // dotted, from the top
  std::string help;
  FieldRef ref;
};

// A visitor for visit(Visitor&). The struct visited must outlive the list, and name arrays the program.
class FieldList {
 public:
  template <typename Struct>
  static FieldList of(Struct& config) {
    FieldList list;
    config.visit(list);
    return list;
  }

  template <typename Member>
  void field(std::string_view key, Member& member, std::string_view help) {
    add(key, FieldRef(&member), help);
  }

  template <typename Enum, size_t N>
  void choice(std::string_view key, Enum& member, const std::array<std::string_view, N>& names,
              std::string_view help) {
    const auto get = [](const void* at) { return static_cast<size_t>(*static_cast<const Enum*>(at)); };
    const auto set = [](void* at, size_t value) { *static_cast<Enum*>(at) = static_cast<Enum>(value); };
    add(key, ChoiceRef{names, &member, get, set}, help);
  }

  template <typename Struct>
  void section(std::string_view key, Struct& sub) {
    const size_t outer = enter(key);
    sub.visit(*this);
    prefix_.resize(outer);
  }

  const std::vector<Field>& fields() const { return fields_; }
  const std::vector<std::string>& sections() const { return sections_; }  // dotted keys

 private:
  void add(std::string_view key, FieldRef ref, std::string_view help);
  size_t enter(std::string_view key);  // returns the length of the prefix to go back to

  std::string prefix_;  // "dataset." inside the section dataset
  std::vector<Field> fields_;
  std::vector<std::string> sections_;
};

// Assigns every field that `tree` holds; the others keep what they have. Returns the origin of each field, in
// the order of list.fields(). Throws user_error "file:line: key: what; what to do" for an unknown key, a
// value of the wrong type or out of its range, and for a value left at ???.
std::vector<Origin> read_fields(const FieldList& list, const ConfigNode& tree);

// The position of the value's text among `names`. Throws user_error "origin: key: what".
size_t choice_index(const ConfigValue& value, std::span<const std::string_view> names);

// The same for an argument of the command line that stands outside the configuration.
template <typename Enum, size_t N>
Enum choice_of(const std::string& key, const std::string& text,
               const std::array<std::string_view, N>& names) {
  ConfigNode node;
  node.kind = ConfigNode::Kind::kScalar;
  node.text = text;
  node.origin.kind = Origin::Kind::kCommandLine;
  return static_cast<Enum>(choice_index({node, key}, names));
}

// "integer", "list of text", "upper, keep or weight", ...
std::string field_type(const Field& field);

// The member's value as YAML that read_fields reads back to the same value.
std::string field_value(const Field& field);

}  // namespace biomoe
