#include <csignal>
#include <cstdio>
#include <new>

#include "apps/commands.h"
#include "biomoe/core/error.h"
#include "biomoe/core/version.h"

int main(int argc, char** argv) {
  using namespace biomoe::apps;
  // A file-size limit then is an error that names the file, and not a death in the middle of a save.
  std::signal(SIGXFSZ, SIG_IGN);
  CLI::App app(
      "BioMoE trains mixture-of-experts models on biological sequences: FASTA in, Hugging Face checkpoint "
      "out");
  app.set_version_flag("--version", std::string("biomoe ") + biomoe::kVersion);
  app.require_subcommand(1);
  for (auto add : {add_train, add_eval, add_data, add_checkpoint, add_generate, add_plan, add_config,
                   add_bench, add_info}) {
    add(app);
  }
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const biomoe::Error& error) {
    fmt::print(stderr, "biomoe: {}\n", error.what());
    return error.kind() == biomoe::ErrorKind::kUser ? 2 : 1;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "biomoe: out of memory\n");
    return 1;
  } catch (const std::exception& error) {
    fmt::print(stderr, "biomoe: {}\n", error.what());
    return 1;
  }
}
