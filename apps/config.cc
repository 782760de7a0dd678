#include "apps/commands.h"
#include "apps/config_options.h"

namespace biomoe::apps {

void add_config(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("config", "the resolved configuration, with where each value came from");
  auto options = add_config_options(*command);
  auto reference = std::make_shared<bool>(false);
  command->add_flag("--reference", *reference, "print the reference of all keys instead (Markdown)");
  command->callback([options, reference] {
    fmt::print("{}", *reference ? config_reference<RunConfig>() : to_yaml(options->load()));
  });
}

}  // namespace biomoe::apps
