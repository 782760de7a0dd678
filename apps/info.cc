#include <htslib/hts.h>

#include "apps/commands.h"
#include "biomoe/core/version.h"
#include "biomoe/train/run_config.h"

namespace biomoe::apps {

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "versions and devices");
  command->callback([] {
    fmt::print("biomoe {}\n", kVersion);
    fmt::print("compiler   {}\n", __VERSION__);
    fmt::print("htslib     {}\n", hts_version());
    fmt::print("cpu        {} threads, fp32\n", resolved_threads(0));
    fmt::print("cuda       not in this build\n");
  });
}

}  // namespace biomoe::apps
