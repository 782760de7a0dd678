#include "apps/commands.h"
#include "apps/config_options.h"
#include "biomoe/checkpoint/async_saver.h"
#include "biomoe/data/vocabulary.h"
#include "biomoe/optim/optimizer.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {
namespace {

void run(const ConfigOptions& options) {
  RunConfig config = options.load().value;
  if (config.model.vocab_size == 0) {
    config.model.vocab_size =
        Vocabulary::open(config.dataset.tokenizer_name_or_path, config.dataset.soft_masked).size();
  }
  config.model.validate();
  const ParameterList parameters(config.model);
  const ModelMemory memory = plan_model_memory(config.model, model_limits(config, true));
  const size_t optimizer = Optimizer::plan_memory(parameters, {}).total();
  const bool staged = config.checkpoint.async_save && config.checkpoint.save_every_n_steps > 0;
  const size_t staging = staged ? memory.weights + optimizer : 0;
  const struct {
    const char* name;
    size_t bytes;
  } rows[] = {{"weights", memory.weights},
              {"gradients", memory.gradients},
              {"optimiser moments", optimizer},
              {"activations and head", memory.saved_activations},
              {"scratch and tables", memory.workspace},
              {"checkpoint staging", staging}};
  size_t total = 0;
  fmt::print("{} parameters, {} active a token, {} tokens a micro-batch\n", parameters.num_parameters(),
             parameters.num_active_parameters(), config.dataset.token_micro_batch_size);
  for (const auto& row : rows) {
    fmt::print("{:<24} {:>16} bytes\n", row.name, row.bytes);
    total += row.bytes;
  }
  fmt::print("{:<24} {:>16} bytes, and the sequences and the program itself\n", "total", total);
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "memory of a run by category, without running it");
  auto options = add_config_options(*command);
  command->callback([options] { run(*options); });
}

}  // namespace biomoe::apps
