// The configuration of a run: YAML files and key=value overrides -> a struct, and back.
//
// A struct names its keys once, in visit():
//   template <typename Visitor> void visit(Visitor& v) {
//     v.field("lr", lr, "peak learning rate");
//     v.choice("policy", policy, kPolicyNames, "...");
//     v.section("dataset", dataset);
//   }
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "biomoe/config/fields.h"
#include "biomoe/config/load.h"
#include "biomoe/config/node.h"
#include "biomoe/config/yaml_reader.h"

namespace biomoe {

template <typename T>
struct ResolvedConfig {
  T value;
  std::vector<Origin> origins;  // of each field, in the order of FieldList::of(value).fields()
};

// `defaults` with everything that `tree` sets. Throws user_error in one line: "file:line: key: what; what to
// do".
template <typename T>
ResolvedConfig<T> resolve(const ConfigNode& tree, T defaults = {}) {
  ResolvedConfig<T> resolved{std::move(defaults), {}};
  resolved.origins = read_fields(FieldList::of(resolved.value), tree);
  return resolved;
}

std::string print_fields(const FieldList& list, const std::vector<Origin>& origins);
std::string reference_of(const FieldList& list);
Origin origin_of(const FieldList& list, const std::vector<Origin>& origins, std::string_view key);

// Every key as YAML that resolves to the same value, each with its origin as a comment ("# a.yaml:3").
template <typename T>
std::string to_yaml(ResolvedConfig<T> resolved) {
  return print_fields(FieldList::of(resolved.value), resolved.origins);
}

// The same without origins.
template <typename T>
std::string to_yaml(T value) {
  return print_fields(FieldList::of(value), {});
}

// Where the value of a dotted key comes from; for messages about values that do not fit each other. Throws
// when there is no such key.
template <typename T>
Origin origin_of(const ResolvedConfig<T>& resolved, std::string_view key) {
  T copy = resolved.value;
  return origin_of(FieldList::of(copy), resolved.origins, key);
}

// The reference of all keys as Markdown: one table a section with key, type, default and meaning.
template <typename T>
std::string config_reference(T defaults = {}) {
  return reference_of(FieldList::of(defaults));
}

}  // namespace biomoe
