#include "apps/checked_options.h"

#include <fmt/format.h>

#include "biomoe/config/scalars.h"

namespace biomoe::apps {
namespace {

template <typename Number>
CLI::Option* add_checked(CLI::App& command, const std::string& name, Number& value, const std::string& help,
                         Bounds<Number> bounds, Number (*read)(const ConfigValue&)) {
  const auto assign = [&value, name, bounds, read](const std::string& text) {
    ConfigNode node;
    node.kind = ConfigNode::Kind::kScalar;
    node.text = text;
    node.origin.kind = Origin::Kind::kCommandLine;
    const ConfigValue given{node, name};
    const Number number = read(given);
    if (number < bounds.low) refuse_value(given, fmt::format("{} is below {}", text, bounds.low));
    if (number > bounds.high) refuse_value(given, fmt::format("{} is above {}", text, bounds.high));
    value = number;
  };
  CLI::Option* option = command.add_option_function<std::string>(name, assign, help);
  if (value >= bounds.low && value <= bounds.high) option->default_str(fmt::format("{}", value));
  return option;
}

}  // namespace

CLI::Option* add_integer(CLI::App& command, const std::string& name, int64_t& value, const std::string& help,
                         Bounds<int64_t> bounds) {
  return add_checked(command, name, value, help, bounds, read_integer)->type_name("INT");
}

CLI::Option* add_number(CLI::App& command, const std::string& name, double& value, const std::string& help,
                        Bounds<double> bounds) {
  return add_checked(command, name, value, help, bounds, read_number)->type_name("FLOAT");
}

}  // namespace biomoe::apps
