#include "apps/commands.h"
#include "apps/config_options.h"
#include "biomoe/core/clock.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {

void add_train(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", "train a model, or continue a run");
  auto options = add_config_options(*command);
  command->callback([options] {
    const double started = now_seconds();
    Trainer trainer(options->load(), started);
    const TrainSummary summary = trainer.run();
    if (summary.validation) {
      fmt::print("validation: {} bases, {:.4f} nats/base, {:.4f} bits/base\n", summary.validation->bases,
                 summary.validation->nats_per_base(), summary.validation->bits_per_base());
    }
    if (!summary.checkpoint.empty()) fmt::print("checkpoint: {}\n", summary.checkpoint);
  });
}

}  // namespace biomoe::apps
