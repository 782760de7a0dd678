#include <fmt/format.h>

#include <optional>

#include "apps/commands.h"
#include "biomoe/data/dataset.h"
#include "biomoe/data/inspect.h"

namespace biomoe::apps {

void add_data(CLI::App& app) {
  CLI::App* command = app.add_subcommand("data", "look at sequence files");
  command->require_subcommand(1);
  CLI::App* inspect =
      command->add_subcommand("inspect", "what a file holds, what will be masked, what is odd");
  struct Options {
    std::vector<std::string> paths;
    ReadOptions read;
    std::string tokenizer;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  inspect->add_option("paths", options->paths, "FASTA, FASTQ or JSONL files, or globs")->required();
  inspect->add_option("--text-column", options->read.text_column, "JSONL: the field that holds the sequence");
  inspect->add_option("--tokenizer", options->tokenizer,
                      "what training would read them with: nucleotide, dna, protein or the path of a "
                      "tokenizer.json; without it symbols are counted as nucleotide codes");
  inspect->add_flag("--json", options->json, "print JSON: one object for one file, else an object by path");
  inspect->callback([options] {
    const std::vector<std::string> paths = expand_paths(options->paths);
    DataConfig policies;
    std::optional<Vocabulary> vocabulary;
    if (!options->tokenizer.empty()) vocabulary = Vocabulary::open(options->tokenizer, policies.soft_masked);
    // In protein N is asparagine.
    if (vocabulary && vocabulary->alphabet() == Alphabet::kProtein) policies.n_runs = NRunPolicy::kKeep;
    nlohmann::json all;
    for (const std::string& path : paths) {
      const nlohmann::json inspection =
          inspect_file(path, options->read, vocabulary ? &*vocabulary : nullptr);
      if (options->json) {
        all[path] = inspection;
      } else {
        fmt::print("{}", render_inspection(path, inspection, policies));
      }
    }
    // Names come from files: bytes that are not UTF-8 are replaced.
    auto dump = [](const nlohmann::json& json) {
      return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);
    };
    if (options->json) fmt::print("{}\n", paths.size() == 1 ? dump(all[paths[0]]) : dump(all));
  });
}

}  // namespace biomoe::apps
