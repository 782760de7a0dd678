#include "biomoe/train/selftest.h"

#include <cmath>

#include "apps/checked_options.h"
#include "apps/commands.h"
#include "biomoe/config/fields.h"
#include "biomoe/core/clock.h"
#include "biomoe/core/error.h"
#include "biomoe/train/run_config.h"

namespace biomoe::apps {
namespace {

struct SelftestOptions {
  std::string device = "auto";
  int64_t num_threads = 0;
};

void run(const SelftestOptions& options) {
  const Device device =
      resolved_device(choice_of<DeviceChoice>("--device", options.device, kDeviceChoiceNames));
  const int threads = resolved_threads(options.num_threads);
  const double band = selftest_band();
  fmt::print("{} steps of a tiny model on the {}; losses may be off by {:.1f} %\n", kSelftestSteps,
             device == Device::kCpu ? "CPU" : "GPU", 100 * band);
  fmt::print("{:<22} {:>10} {:>10} {:>9} {:>8}\n", "recipe", "loss", "recorded", "off by", "seconds");
  std::string outside;
  for (const SelftestCase& test : selftest_cases()) {
    const double begin = now_seconds();
    const double loss = run_selftest(test, device, threads);
    const double off = loss / test.loss - 1;
    const bool good = std::abs(off) <= band;
    fmt::print("{:<22} {:>10.5f} {:>10.5f} {:>+7.2f} % {:>8.2f}  {}\n", test.name, loss, test.loss, 100 * off,
               now_seconds() - begin, good ? "ok" : "FAILED");
    if (!good) outside += fmt::format("{}{}", outside.empty() ? "" : ", ", test.name);
  }
  if (!outside.empty()) throw failure("selftest: the loss is outside of the band: {}", outside);
  fmt::print("selftest: ok\n");
}

}  // namespace

void add_selftest(CLI::App& app) {
  auto options = std::make_shared<SelftestOptions>();
  CLI::App* command = app.add_subcommand(
      "selftest", "trains a tiny model in each 8-bit recipe and compares with recorded losses");
  command->add_option("--device", options->device, "auto, cpu or cuda");
  add_integer(*command, "--num-threads", options->num_threads, "CPU threads; 0: all");
  command->callback([options] { run(*options); });
}

}  // namespace biomoe::apps
