// How far a long piece of work is: one line that renews itself on a terminal, a plain line now and then
// elsewhere.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace biomoe {

enum class ProgressUnit : uint8_t { kItems, kBytes };

struct ProgressOptions {
  std::string label;      // "training", "reading genome.fa"
  std::string item = "";  // what kItems counts: "steps", "bases"
  int64_t total = 0;      // 0: not known; then no share and no ETA
  int64_t start = 0;      // done before this run (a resumed one): not part of the rate
  ProgressUnit unit = ProgressUnit::kItems;
  bool show_rate = true;             // items or bytes a second; false when the details say it better
  double terminal_interval_s = 0.2;  // between renewals of the line
  double plain_interval_s = 30;      // between lines where there is no terminal
  std::FILE* out = stderr;
  bool terminal = false;            // renew one line; see is_terminal()
  int width = 0;                    // columns; 0: asked of the terminal at each renewal
  std::function<double()> seconds;  // a clock that does not go back; empty: the system's
};

// True when `out` is a terminal that moves its cursor (TERM is not "dumb").
bool is_terminal(std::FILE* out);

// Not thread-safe. Uses '\r' and blanks, no escape codes; off a terminal, no '\r' either.
class Progress {
 public:
  explicit Progress(ProgressOptions options);
  // Ends the line on a terminal when finish() was not called (an error is on its way).
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` of options.total; `details` ("loss 1.3612  4,103 tokens/s") stand after the share. Prints only
  // when the interval has passed. Cheap enough to be called for every step or block.
  void update(int64_t done, std::string_view details = {});

  // Prints a line of text without breaking the live one.
  void print_line(std::string_view text);

  // The last state, always printed, and the end of the line. Later calls do nothing.
  void finish(int64_t done, std::string_view details = {});

 private:
  std::string compose(int64_t done, std::string_view details, bool last) const;
  void show(const std::string& line, bool last);
  int columns() const;

  ProgressOptions options_;
  double begin_ = 0;
  double printed_at_ = 0;  // when the last line was printed
  bool printed_ = false;
  bool finished_ = false;
  size_t shown_ = 0;  // columns that the live line covers
};

// What a training step shows beside the progress of the run.
struct TrainingFigures {
  double loss = 0;
  std::optional<double> nats_per_base{};  // nothing where nothing was predicted
  double tokens_per_s = 0;
};

// "loss 1.3612  1.3598 nats/base  4,103 tokens/s"
std::string training_details(const TrainingFigures& figures);

std::string count_text(double count);       // "4,103"
std::string bytes_text(double bytes);       // "1.5 MB" (powers of 1000)
std::string duration_text(double seconds);  // "0:07", "12:30", "3:05:00", "2d 03:05"; "?" when not finite

}  // namespace biomoe
