// Numbers of the command line: read as those of a configuration are, so that nothing is cut or clamped.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>

namespace biomoe::apps {

template <typename Number>
struct Bounds {
  Number low = 0;
  Number high = std::numeric_limits<Number>::max();
};

// An option whose value lies within the bounds (included); `value` keeps its default where it is not given,
// which the help shows where it could be given.
// Parsing throws user_error naming the option for anything else.
CLI::Option* add_integer(CLI::App& command, const std::string& name, int64_t& value, const std::string& help,
                         Bounds<int64_t> bounds = {});
CLI::Option* add_number(CLI::App& command, const std::string& name, double& value, const std::string& help,
                        Bounds<double> bounds = {});

}  // namespace biomoe::apps
