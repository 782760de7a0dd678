#include "biomoe/train/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "biomoe/core/clock.h"
#include "biomoe/core/console.h"

namespace biomoe {
namespace {

bool continues_character(char c) {
  return (static_cast<unsigned char>(c) & 0xc0) == 0x80;
}

size_t columns_of(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return !continues_character(c); }));
}

// At most `columns` characters of UTF-8 text, never half of one.
std::string fit(std::string_view text, size_t columns) {
  size_t end = 0;
  for (size_t taken = 0; end < text.size(); ++end) {
    if (!continues_character(text[end]) && taken++ == columns) break;
  }
  return std::string(text.substr(0, end));
}

// Labels and details may hold names of records and files: nothing in them may move the cursor.
std::string without_controls(std::string_view text) {
  std::string out(text);
  std::replace_if(
      out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, '?');
  return out;
}

}  // namespace

bool is_terminal(std::FILE* out) {
  const char* term = std::getenv("TERM");
  return isatty(fileno(out)) != 0 && !(term && std::string_view(term) == "dumb");
}

Progress::Progress(ProgressOptions options) : options_(std::move(options)) {
  if (!options_.seconds) options_.seconds = now_seconds;
  begin_ = printed_at_ = options_.seconds();
}

Progress::~Progress() {
  if (!finished_ && shown_ > 0) tell(options_.out, "\n");
}

void Progress::update(int64_t done, std::string_view details) {
  if (finished_) return;
  const double interval = options_.terminal ? options_.terminal_interval_s : options_.plain_interval_s;
  const double now = options_.seconds();
  if (now - printed_at_ < interval && !(options_.terminal && !printed_)) return;
  printed_at_ = now;
  printed_ = true;
  show(compose(done, details, false), false);
}

void Progress::finish(int64_t done, std::string_view details) {
  if (finished_) return;
  show(compose(done, details, true), true);
  finished_ = true;
}

void Progress::print_line(std::string_view text) {
  if (shown_ > 0) tell(options_.out, "\r{}\r", std::string(shown_, ' '));
  shown_ = 0;
  printed_ = false;  // the live line comes back with the next update
  tell(options_.out, "{}\n", text);
}

std::string Progress::compose(int64_t done, std::string_view details, bool last) const {
  const bool bytes = options_.unit == ProgressUnit::kBytes;
  const auto amount = [&](int64_t n) {
    return bytes ? bytes_text(static_cast<double>(n)) : count_text(static_cast<double>(n));
  };
  std::string line = fmt::format("{}  {}", options_.label, amount(done));
  if (options_.total > 0) line += fmt::format("/{}", amount(options_.total));
  if (!bytes && !options_.item.empty()) line += fmt::format(" {}", options_.item);
  if (options_.total > 0) {
    const double share = static_cast<double>(done) / static_cast<double>(options_.total);
    line += fmt::format("  {:.0f}%", std::floor(100 * std::clamp(share, 0.0, 1.0)));
  }
  if (!details.empty()) line += fmt::format("  {}", details);
  const double spent = options_.seconds() - begin_;
  const double rate = spent > 0 ? static_cast<double>(done - options_.start) / spent : 0;
  if (options_.show_rate && rate > 0) {
    const bool named = !bytes && !options_.item.empty();
    line += fmt::format("  {}{}{}/s", bytes ? bytes_text(rate) : count_text(rate), named ? " " : "",
                        named ? options_.item : "");
  }
  const double left = static_cast<double>(std::max<int64_t>(0, options_.total - done));
  if (last) {
    line += fmt::format("  in {}", duration_text(spent));
  } else if (options_.total > 0 && rate > 0) {
    line += fmt::format("  ETA {}", duration_text(left / rate));
  }
  return without_controls(line);
}

int Progress::columns() const {
  if (options_.width > 0) return options_.width;
  winsize size{};
  const bool known = ioctl(fileno(options_.out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

void Progress::show(const std::string& line, bool last) {
  if (!options_.terminal) {
    tell(options_.out, "{}\n", line);
  } else {
    // One column stays free: a cursor past the last one would start a new line.
    const std::string fitted = fit(line, static_cast<size_t>(std::max(columns() - 1, 1)));
    const size_t covered = columns_of(fitted);
    const std::string rest(shown_ > covered ? shown_ - covered : 0, ' ');
    tell(options_.out, "\r{}{}{}", fitted, rest, last ? "\n" : "");
    shown_ = last ? 0 : covered;
  }
}

std::string training_details(const TrainingFigures& figures) {
  const std::string nats = figures.nats_per_base ? fmt::format("{:.4f}", *figures.nats_per_base) : "-";
  return fmt::format("loss {:.4f}  {} nats/base  {} tokens/s", figures.loss, nats,
                     count_text(figures.tokens_per_s));
}

std::string count_text(double count) {
  std::string digits = fmt::format("{:.0f}", count);
  const size_t first = digits[0] == '-' ? 1 : 0;
  if (!std::isfinite(count)) return digits;
  for (size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 6> kUnits{"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  // 999.95 would be printed as 1000.0.
  for (; unit + 1 < kUnits.size() && std::abs(bytes) >= (unit == 0 ? 999.5 : 999.95); ++unit) bytes /= 1000;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string duration_text(double seconds) {
  constexpr double kLongest = 1e9;  // some 30 years
  if (!(seconds >= 0 && seconds < kLongest)) return "?";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  const int64_t days = whole / 86400;
  const int64_t hours = whole / 3600 % 24;
  const int64_t minutes = whole / 60 % 60;
  if (days > 0) return fmt::format("{}d {:02}:{:02}", days, hours, minutes);
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60);
  return fmt::format("{}:{:02}", minutes, whole % 60);
}

}  // namespace biomoe
