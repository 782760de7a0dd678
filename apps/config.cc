#include "apps/commands.h"
#include "apps/config_options.h"

namespace biomoe::apps {
namespace {

// docs/configuration.md, whole.
void print_reference() {
  fmt::print(
      "# Configuration reference\n\n"
      "Made by `biomoe config --reference`. Any key can be set in a YAML file or on the command line as "
      "`key=value` (`section.key=value`).\n\n{}",
      config_reference<RunConfig>());
}

}  // namespace

void add_config(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("config", "the resolved configuration, with where each value came from");
  auto options = add_config_options(*command);
  auto reference = std::make_shared<bool>(false);
  command->add_flag("--reference", *reference, "print the reference of all keys instead (Markdown)");
  command->callback([options, reference] {
    if (*reference) {
      print_reference();
    } else {
      const ResolvedConfig<RunConfig> config = options->load();
      tell_unused(config);
      fmt::print("{}", to_yaml(config));
    }
  });
}

}  // namespace biomoe::apps
