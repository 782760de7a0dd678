#include "biomoe/train/generate.h"

#include "apps/checked_options.h"
#include "apps/commands.h"
#include "biomoe/config/fields.h"
#include "biomoe/core/console.h"

namespace biomoe::apps {
namespace {

// Why the continuation is shorter than asked for, on standard error: standard output is the sequence alone.
void explain_stop(const Generated& result, int64_t wanted, int64_t window) {
  if (result.stop == GenerateStop::kEos) {
    tell(stderr, "ended by the model after {} of {} tokens\n", result.tokens, wanted);
  } else if (result.stop == GenerateStop::kWindowFull) {
    tell(stderr,
         "stopped after {} of {} tokens: the window of {} tokens is full; --max-seq-length widens it\n",
         result.tokens, wanted, window);
  }
}

}  // namespace

void add_generate(CLI::App& app) {
  CLI::App* command = app.add_subcommand("generate", "continue a sequence");
  struct Options {
    std::string checkpoint;
    GenerateOptions generate;
    LoadOptions load;
    std::string device{kDeviceChoiceNames[0]};
    int64_t seed = 0;
  };
  auto options = std::make_shared<Options>();
  command->add_option("--checkpoint", options->checkpoint, "run, checkpoint or Hugging Face folder")
      ->required();
  command->add_option("--prompt", options->generate.prompt, "what comes before");
  add_integer(*command, "--max-new-tokens", options->generate.max_new_tokens, "how much to add");
  add_number(*command, "--temperature", options->generate.temperature, "0: always the most probable");
  add_integer(*command, "--top-k", options->generate.top_k, "draw from the k most probable; 0: all");
  add_number(*command, "--top-p", options->generate.top_p, "draw from the most probable that hold this mass",
             {0.0, 1.0});
  add_integer(*command, "--seed", options->seed, "of the draws");
  add_integer(*command, "--max-seq-length", options->load.max_seq_length,
              "window of prompt and continuation; default: that of the run", {1});
  command->add_option("--tokenizer", options->load.tokenizer, kTokenizerHelp);
  command->add_option("--device", options->device, "auto, cpu or cuda");
  add_integer(*command, "--threads", options->load.num_threads, "CPU threads; 0: all");
  command->callback([options] {
    options->load.device = choice_of<DeviceChoice>("--device", options->device, kDeviceChoiceNames);
    options->generate.seed = static_cast<uint64_t>(options->seed);
    LoadedModel loaded = load_model(options->checkpoint, options->load);
    const Generated result = generate(loaded, options->generate);
    tell(stderr, "on {}\n", describe_device(*loaded.model));
    fmt::print("{}{}\n", options->generate.prompt, result.text);
    explain_stop(result, options->generate.max_new_tokens, loaded.model->limits().max_seqlen);
  });
}

}  // namespace biomoe::apps
