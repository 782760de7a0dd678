#include <csignal>

#include "apps/commands.h"
#include "apps/config_options.h"
#include "biomoe/core/clock.h"
#include "biomoe/core/console.h"
#include "biomoe/train/ranks.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {
namespace {

void print_sanity(const SanityReport& report) {
  for (const std::string& line : report.passed) tell(stdout, "  {}\n", line);
  if (report.ok()) tell(stdout, "PASS\n");
}

void run(const ConfigOptions& options, double started) {
  ResolvedConfig<RunConfig> config = options.load();
  const auto ranks = std::make_shared<const Ranks>(start_ranks(config.value));
  const bool first = ranks->first();
  if (first) tell_unused(config);
  try {
    Trainer trainer(std::move(config), started, ranks);
    const TrainSummary summary = trainer.run();
    if (first && summary.validation) {
      tell(stdout, "validation: {} bases, {}\n", summary.validation->bases, score_text(*summary.validation));
    }
    if (first && !summary.checkpoint.empty()) tell(stdout, "checkpoint: {}\n", summary.checkpoint);
    if (!summary.sanity) return;
    if (first) print_sanity(*summary.sanity);
    if (!summary.sanity->ok()) throw failure("FAIL: {}", summary.sanity->failed.front());
  } catch (const Error& error) {
    throw error_of_rank(*ranks, error);
  }
}

}  // namespace

void add_train(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", "train a model, or continue a run");
  auto options = add_config_options(*command);
  command->callback([options] {
    // A pipe that nobody reads any more ends the output and not the run.
    std::signal(SIGPIPE, SIG_IGN);
    run(*options, now_seconds());
  });
}

}  // namespace biomoe::apps
