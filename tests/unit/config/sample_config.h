// A configuration with every type of field, for the tests.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/config/config.h"
#include "biomoe/core/error.h"

namespace biomoe {

enum class Colour { kRed, kGreen, kDarkBlue };
inline constexpr std::array<std::string_view, 3> kColourNames{"red", "green", "dark_blue"};

struct InnerSample {
  int64_t depth = 2;
  std::string label = "plain";
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("depth", depth, "levels | of something");
    v.field("label", label, "a name");
  }
};

struct SectionSample {
  std::vector<std::string> path;
  std::vector<double> betas{0.9, 0.95};
  int64_t max_seq_length = 1024;
  Colour colour = Colour::kRed;
  InnerSample inner;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("path", path, "files");
    v.field("betas", betas, "decay rates");
    v.field("max_seq_length", max_seq_length, "tokens of a window");
    v.choice("colour", colour, kColourNames, "a colour");
    v.section("inner", inner);
  }
};

struct SampleConfig {
  int64_t steps = 10;
  double lr = 1e-3;
  bool shuffle = true;
  std::string name = "run";
  std::optional<int64_t> head_dim;
  std::optional<double> clip = 1.0;
  std::optional<std::string> note;
  std::optional<bool> checked;
  SectionSample dataset;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("steps", steps, "optimiser steps");
    v.field("lr", lr, "learning rate");
    v.field("shuffle", shuffle, "shuffle or not");
    v.field("name", name, "name of the run");
    v.field("head_dim", head_dim, "head width");
    v.field("clip", clip, "largest norm");
    v.field("note", note, "free text");
    v.field("checked", checked, "yes, no or not said");
    v.section("dataset", dataset);
  }
};

inline SampleConfig from_yaml(const std::string& text) {
  return resolve<SampleConfig>(parse_yaml(text, "a.yaml")).value;
}

inline SampleConfig from_overrides(const std::vector<std::string>& overrides) {
  ConfigSource source;
  source.overrides = overrides;
  return resolve<SampleConfig>(load_config(source)).value;
}

// The message of the user error that `action` throws; fails the test when it throws none, when it is not a
// user error, or when it is more than one line.
inline std::string user_message(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

inline std::string yaml_message(const std::string& text) {
  return user_message([&] { from_yaml(text); });
}

inline std::string override_message(const std::string& argument) {
  return user_message([&] { from_overrides({argument}); });
}

}  // namespace biomoe
