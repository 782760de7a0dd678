#include "biomoe/train/generate.h"
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
  command->add_option("--max-seq-length", options->load.max_seq_length,
                      "window of prompt and continuation; default: that of the run");
  command->add_option("--device", options->device, "auto, cpu or cuda");
  command->add_option("--threads", options->load.num_threads, "CPU threads; default: all");
  command->callback([options] {
    options->load.device = choice_of<DeviceChoice>("--device", options->device, kDeviceChoiceNames);
    LoadedModel loaded = load_model(options->checkpoint, options->load);
    const Generated result = generate(loaded, options->generate);
    tell(stderr, "on {}\n", describe_device(*loaded.model));
    fmt::print("{}{}\n", options->generate.prompt, result.text);
    explain_stop(result, options->generate.max_new_tokens, loaded.model->limits().max_seqlen);
  });
}

}  // namespace biomoe::apps
