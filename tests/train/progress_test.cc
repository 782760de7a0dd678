#include "biomoe/train/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace biomoe {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// A Progress that writes to memory and reads a clock the test sets.
class ProgressLine : public ::testing::Test {
 protected:
  ProgressLine() : stream_(open_memstream(&buffer_, &size_)) {
    options_.label = "training";
    options_.item = "steps";
    options_.total = 100;
    options_.out = stream_;
    options_.width = 80;
    options_.seconds = [this] { return now_; };
  }
  ~ProgressLine() override {
    std::fclose(stream_);
    std::free(buffer_);
  }
  std::string text() {
    std::fflush(stream_);
    return std::string(buffer_, size_);
  }
  // What a terminal shows: '\r' goes to the start of the line, a character replaces the one that stands
  // there.
  std::vector<std::string> screen() {
    std::vector<std::string> lines(1);
    size_t column = 0;
    for (const char c : text()) {
      if (c == '\n') {
        lines.emplace_back();
        column = 0;
      } else if (c == '\r') {
        column = 0;
      } else {
        if (lines.back().size() <= column) lines.back().resize(column + 1, ' ');
        lines.back()[column++] = c;
      }
    }
    for (std::string& line : lines) line.erase(line.find_last_not_of(' ') + 1);
    return lines;
  }

  char* buffer_ = nullptr;
  size_t size_ = 0;
  std::FILE* stream_;
  double now_ = 1000;
  ProgressOptions options_;
};

TEST_F(ProgressLine, OffATerminalPlainLinesComeAtTheInterval) {
  Progress progress(options_);
  for (int step = 1; step <= 100; ++step) {
    now_ += 1;
    progress.update(step, "loss 1.5");
  }
  progress.finish(100, "loss 1.4");
  EXPECT_EQ(text(),
            "training  30/100 steps  30%  loss 1.5  1 steps/s  ETA 1:10\n"
            "training  60/100 steps  60%  loss 1.5  1 steps/s  ETA 0:40\n"
            "training  90/100 steps  90%  loss 1.5  1 steps/s  ETA 0:10\n"
            "training  100/100 steps  100%  loss 1.4  1 steps/s  in 1:40\n");
}

TEST_F(ProgressLine, OnATerminalOneLineRenewsItself) {
  options_.terminal = true;
  Progress progress(options_);
  now_ += 1;
  progress.update(1, "loss 123456.5 and much more");
  EXPECT_THAT(screen().back(), HasSubstr("1/100 steps"));
  now_ += 0.1;
  progress.update(2, "loss 1");
  EXPECT_THAT(screen().back(), HasSubstr("1/100 steps")) << "renewed before the interval";
  now_ += 1;
  progress.update(3, "loss 1");
  EXPECT_THAT(screen().back(), HasSubstr("3/100 steps  3%  loss 1  1 steps/s"));
  EXPECT_THAT(screen().back(), Not(HasSubstr("more"))) << "the longer line before shows through";
  EXPECT_EQ(screen().size(), 1u);
  progress.finish(100);
  EXPECT_EQ(screen().size(), 2u);
  EXPECT_THAT(screen()[0], StartsWith("training  100/100 steps"));
  const std::string before = text();
  now_ += 100;
  progress.update(100);
  progress.finish(100);
  EXPECT_EQ(text(), before) << "nothing is printed after the end";
  EXPECT_EQ(before.find('\x1b'), std::string::npos) << "escape codes";
}

TEST_F(ProgressLine, TheLineStaysNarrowerThanTheTerminal) {
  options_.terminal = true;
  for (const int width : {1, 2, 20, 40}) {
    options_.width = width;
    Progress progress(options_);
    now_ += 1;
    progress.update(5, "details that are much longer than a narrow terminal has room for, whatever it shows");
    progress.finish(6);
  }
  size_t longest = 0;
  for (const std::string& line : screen()) longest = std::max(longest, line.size());
  EXPECT_EQ(longest, 39u);
}

TEST_F(ProgressLine, NamesCannotMoveTheCursorOrBeCutInHalf) {
  options_.terminal = true;
  options_.width = 6;
  options_.label = "a\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9";
  {
    Progress progress(options_);
    now_ += 1;
    progress.update(5);
  }
  EXPECT_EQ(text(), "\ra\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\n");
  options_.width = 80;
  options_.label = "a\x1b[2J\nb";
  Progress progress(options_);
  progress.finish(5);
  EXPECT_THAT(text(), HasSubstr("\ra?[2J?b"));
}

TEST_F(ProgressLine, OtherLinesDoNotBreakTheLiveOne) {
  options_.terminal = true;
  Progress progress(options_);
  now_ += 1;
  progress.update(1);
  progress.print_line("validation 1.36");
  EXPECT_EQ(screen(), (std::vector<std::string>{"validation 1.36", ""}));
  progress.update(2);
  EXPECT_THAT(screen()[1], StartsWith("training  2/100"));
  progress.finish(2);
}

TEST_F(ProgressLine, AnUnfinishedLineIsEnded) {
  options_.terminal = true;
  {
    Progress progress(options_);
    now_ += 1;
    progress.update(1);
  }
  EXPECT_EQ(text().back(), '\n');
}

TEST_F(ProgressLine, StepsBeforeAResumeDoNotCountAsSpeed) {
  options_.start = 50;
  options_.plain_interval_s = 10;
  Progress progress(options_);
  now_ += 10;
  progress.update(60);
  EXPECT_EQ(text(), "training  60/100 steps  60%  1 steps/s  ETA 0:40\n");
}

TEST_F(ProgressLine, BytesAndUnknownTotals) {
  options_.label = "reading";
  options_.unit = ProgressUnit::kBytes;
  options_.total = 4'000'000;
  options_.plain_interval_s = 1;
  {
    Progress progress(options_);
    now_ += 2;
    progress.update(1'000'000);
  }
  EXPECT_EQ(text(), "reading  1.0 MB/4.0 MB  25%  500.0 kB/s  ETA 0:06\n");
  options_.total = 0;
  options_.unit = ProgressUnit::kItems;
  options_.item = "records";
  options_.show_rate = false;
  Progress progress(options_);
  progress.finish(1234);
  EXPECT_THAT(text(), HasSubstr("\nreading  1,234 records  in 0:00\n"));
}

TEST(ProgressText, Counts) {
  EXPECT_EQ(count_text(0), "0");
  EXPECT_EQ(count_text(999.4), "999");
  EXPECT_EQ(count_text(1000), "1,000");
  EXPECT_EQ(count_text(4639675), "4,639,675");
  EXPECT_EQ(count_text(-1234), "-1,234");
  EXPECT_EQ(count_text(-123), "-123");
  EXPECT_EQ(count_text(std::numeric_limits<double>::infinity()), "inf");
}

TEST(ProgressText, Bytes) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(1000), "1.0 kB");
  EXPECT_EQ(bytes_text(999'960), "1.0 MB");
  EXPECT_EQ(bytes_text(2.5e9), "2.5 GB");
  EXPECT_EQ(bytes_text(5e18), "5000.0 PB");
}

TEST(ProgressText, Durations) {
  EXPECT_EQ(duration_text(0), "0:00");
  EXPECT_EQ(duration_text(59.6), "1:00");
  EXPECT_EQ(duration_text(750), "12:30");
  EXPECT_EQ(duration_text(3 * 3600 + 5 * 60), "3:05:00");
  EXPECT_EQ(duration_text(2 * 86400 + 3 * 3600 + 5 * 60 + 9), "2d 03:05");
  EXPECT_EQ(duration_text(-1), "?");
  EXPECT_EQ(duration_text(std::nan("")), "?");
  EXPECT_EQ(duration_text(1e300), "?");
}

TEST(ProgressText, TrainingDetails) {
  EXPECT_EQ(training_details({.loss = 1.36123, .nats_per_base = 1.3598, .tokens_per_s = 4103.2}),
            "loss 1.3612  1.3598 nats/base  4,103 tokens/s");
}

TEST(ProgressText, AFileIsNoTerminal) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), std::fclose);
  EXPECT_FALSE(is_terminal(file.get()));
}

}  // namespace
}  // namespace biomoe
