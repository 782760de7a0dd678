#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <new>
#include <string_view>
#include <system_error>

#include "apps/commands.h"
#include "biomoe/config/launch.h"
#include "biomoe/config/node.h"
#include "biomoe/core/console.h"
#include "biomoe/core/error.h"
#include "biomoe/core/version.h"
#include "biomoe/data/alphabet.h"

namespace biomoe::apps {
namespace {

int report(std::string_view what, int status) {
  tell(stderr, "biomoe: {}\n", one_line(what));
  return status;
}

// 0, or what to exit with after a report: a full disk or a closed pipe shows when text is printed, or only
// here, where the rest of it leaves the buffer.
int finish_output() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
  return report("standard output could not be written; look at the disk or the program that it goes to", 1);
}

// What no command can mean, refused before any of them reads it.
void check_arguments(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i], before = argv[i - 1];
    if (!is_text(word)) {
      throw user_error("{}: not UTF-8 text; correct it, or rename the file that it names",
                       printable_utf8(word));
    }
    if (word.empty() && before != "--prompt")
      throw user_error("the argument after {} is empty; give a value or leave both out", before);
    if (word.starts_with("--") && word.find('=') == word.size() - 1)
      throw user_error("{} has no value after '='; give one or leave it out", word);
  }
}

// Files would be written by all at once, and figures told as often.
void run_as_one_process(CLI::App& command) {
  command.parse_complete_callback([&command] {
    const Launch launch = read_launch();
    if (launch.processes > 1)
      throw user_error(
          "{}: runs as one process, and {} were started; start it without mpirun, srun or torchrun's "
          "variables",
          command.get_name(), launch.processes);
  });
}

std::string suggestion(const std::string& word, const std::vector<std::string>& names) {
  const std::string near = nearest(word, names);
  return near.empty() ? "" : fmt::format("; did you mean {}?", near);
}

// The first option that the command does not have, and the one that may be meant; "" for none.
std::string unknown_option(const CLI::App& command, int argc, char** argv) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    if (option->nonpositional()) names.push_back(option->get_name());
  }
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    word = word.substr(0, word.find('='));
    if (word.starts_with("--") && command.get_option_no_throw(word) == nullptr)
      return fmt::format("there is no option {}{}", shown(word), suggestion(word, names));
  }
  return "";
}

// The command line in words of the user: which command, what is wrong with it, what was meant.
std::string explain(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  const CLI::App* command = &app;
  std::string called;  // "", "checkpoint ", "checkpoint export "
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto commands = command->get_subcommands([](const CLI::App*) { return true; });
    if (commands.empty() || word.starts_with('-')) break;
    std::vector<std::string> names;
    for (const CLI::App* candidate : commands) names.push_back(candidate->get_name());
    const auto found = std::find(names.begin(), names.end(), word);
    if (found == names.end()) {
      return fmt::format("no command named {}{}; the commands are: {}", shown(called + word),
                         suggestion(word, names), joined(names, ", "));
    }
    command = commands[static_cast<size_t>(found - names.begin())];
    called += word + " ";
  }
  const bool incomplete = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  const std::string unknown = incomplete || dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr
                                  ? unknown_option(*command, argc, argv)
                                  : "";
  return fmt::format("{} (see biomoe {}--help)", unknown.empty() ? error.what() : unknown, called);
}

bool is_users(const std::error_code& code) {
  for (const auto reason :
       {std::errc::no_such_file_or_directory, std::errc::permission_denied, std::errc::filename_too_long,
        std::errc::not_a_directory, std::errc::is_a_directory, std::errc::too_many_symbolic_link_levels}) {
    if (code == reason) return true;
  }
  return false;
}

// A stream that is closed at the start is an empty one: else the next file that is opened, a checkpoint
// maybe, would have its number and be written into.
void open_closed_streams() {
  int opened = open("/dev/null", O_RDWR);
  while (opened >= 0 && opened <= STDERR_FILENO) opened = open("/dev/null", O_RDWR);
  if (opened >= 0) close(opened);
}

// As a configuration has it: not numbers.
std::string boolean_problem(const std::string& text) {
  return text == "true" || text == "false" ? "" : fmt::format("true or false is expected, not {}", text);
}

// Booleans as a user writes them, true and not 1, in defaults and arguments; no default for an empty list.
void tidy_options(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string text = option->get_default_str();
    if (text == "[]") option->default_str("");
    if (option->get_type_name() != "BOOLEAN") continue;
    if (!text.empty()) option->default_str(text == "1" ? "true" : "false");
    option->check(boolean_problem);
  }
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) tidy_options(*command);
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    check_arguments(argc, argv);
    app.parse(argc, argv);
    return finish_output();
  } catch (const CLI::Success& success) {
    app.exit(success);
    return finish_output();
  } catch (const CLI::ParseError& error) {
    return report(explain(app, error, argc, argv), 2);
  } catch (const Error& error) {
    return report(error.what(), error.kind() == ErrorKind::kUser ? 2 : 1);
  } catch (const std::filesystem::filesystem_error& error) {
    return report(fmt::format("{}: {}", error.path1().string(), error.code().message()),
                  is_users(error.code()) ? 2 : 1);
  } catch (const std::system_error& error) {
    if (const int lost = finish_output()) return lost;
    if (error.code() != std::errc::resource_unavailable_try_again) return report(error.what(), 1);
    return report(
        "a thread could not be started: a limit on memory or on processes is reached; raise it (ulimit -v, "
        "ulimit -u) or ask for fewer threads",
        1);
  } catch (const std::bad_alloc&) {
    return report("out of memory", 1);
  } catch (const std::length_error&) {
    return report("out of memory", 1);
  } catch (const std::exception& error) {
    return report(error.what(), 1);
  }
}

}  // namespace
}  // namespace biomoe::apps

int main(int argc, char** argv) {
  using namespace biomoe::apps;
  open_closed_streams();
  // A file-size limit then is an error that names the file, and not a death in the middle of a save.
  std::signal(SIGXFSZ, SIG_IGN);
  CLI::App app(
      "BioMoE trains mixture-of-experts models on biological sequences: FASTA in, Hugging Face checkpoint "
      "out",
      "biomoe");
  app.set_version_flag("--version", std::string("biomoe ") + biomoe::kVersion);
  app.require_subcommand(1);
  app.option_defaults()->always_capture_default();  // which the help shows; subcommands take it over
  for (auto add : {add_train, add_eval, add_data, add_checkpoint, add_generate, add_plan, add_config,
                   add_bench, add_info, add_selftest}) {
    add(app);
  }
  tidy_options(app);
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string name = command->get_name();
    if (name != "train" && name != "selftest" && name != "bench") run_as_one_process(*command);
  }
  CLI::App* bench = app.get_subcommand("bench");
  for (const char* name : {"moe", "ops"}) run_as_one_process(*bench->get_subcommand(name));
  return run(app, argc, argv);
}
