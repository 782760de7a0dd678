// The subcommands of biomoe: each parses, builds one object and runs it.
#pragma once

#include <CLI/CLI.hpp>

namespace biomoe::apps {

inline constexpr char kTokenizerHelp[] =
    "nucleotide, dna, protein or the path of a tokenizer.json; default: that of the checkpoint";

// Adds the subcommand to `app`; its callback does the work and throws biomoe::Error.
void add_train(CLI::App& app);
void add_eval(CLI::App& app);
void add_data(CLI::App& app);
void add_checkpoint(CLI::App& app);
void add_generate(CLI::App& app);
void add_plan(CLI::App& app);
void add_config(CLI::App& app);
void add_bench(CLI::App& app);
void add_info(CLI::App& app);
void add_selftest(CLI::App& app);

}  // namespace biomoe::apps
