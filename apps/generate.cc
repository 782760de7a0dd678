#include "biomoe/train/generate.h"
#include "apps/commands.h"

namespace biomoe::apps {

void add_generate(CLI::App& app) {
  CLI::App* command = app.add_subcommand("generate", "continue a sequence");
  struct Options {
    std::string checkpoint;
    GenerateOptions generate;
    int64_t num_threads = 0;
  };
  auto options = std::make_shared<Options>();
  command->add_option("--checkpoint", options->checkpoint, "run, checkpoint or Hugging Face folder")
      ->required();
  command->add_option("--prompt", options->generate.prompt, "what comes before");
  command->add_option("--max-new-tokens", options->generate.max_new_tokens, "how much to add");
  command->add_option("--temperature", options->generate.temperature, "0: always the most probable");
  command->add_option("--top-k", options->generate.top_k, "draw from the k most probable; 0: all");
  command->add_option("--top-p", options->generate.top_p, "draw from the most probable that hold this mass");
  command->add_option("--seed", options->generate.seed, "of the draws");
  command->add_option("--threads", options->num_threads, "CPU threads; default: all");
  command->callback([options] {
    LoadedModel loaded = load_model(options->checkpoint, {.num_threads = options->num_threads});
    fmt::print("{}{}\n", options->generate.prompt, generate(loaded, options->generate));
  });
}

}  // namespace biomoe::apps
