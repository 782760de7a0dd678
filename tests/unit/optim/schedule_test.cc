#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "biomoe/core/error.h"
#include "biomoe/optim/optim_config.h"

namespace biomoe {
namespace {

constexpr double kPeak = 3e-3;
// A handful of roundings of a value of at most kPeak.
constexpr double kRounding = 8 * std::numeric_limits<double>::epsilon() * kPeak;

TEST(Schedule, WarmUpIsLinearAndEndsAtThePeak) {
  const ScheduleConfig schedule{.num_warmup_steps = 4, .num_decay_steps = 10, .min_lr_ratio = 0.1};
  const double want[] = {0.25, 0.5, 0.75, 1.0, 1.0};  // of the peak; the decay starts at the peak too
  for (int64_t step = 0; step < 5; ++step) {
    EXPECT_NEAR(scheduled_lr(schedule, kPeak, 100, step), want[step] * kPeak, kRounding) << step;
  }
}

TEST(Schedule, DecayIsAHalfCosineThenConstant) {
  const ScheduleConfig schedule{.num_warmup_steps = 4, .num_decay_steps = 12, .min_lr_ratio = 0.1};
  // cos(pi/6), cos(pi/3), cos(pi/2), cos(2pi/3), cos(pi) at steps 2, 4, 6, 8 and 12 of the decay.
  const struct {
    int64_t step;
    double cosine;
  } rows[] = {{4, 1.0},   {6, std::sqrt(3.0) / 2}, {8, 0.5}, {10, 0.0}, {12, -0.5}, {16, -1.0},
              {17, -1.0}, {int64_t{1} << 40, -1.0}};
  for (const auto& row : rows) {
    const double want = kPeak * (0.1 + 0.9 * (1.0 + row.cosine) / 2);
    EXPECT_NEAR(scheduled_lr(schedule, kPeak, 1000, row.step), want, kRounding) << row.step;
  }
}

TEST(Schedule, WithoutDecayStepsTheRestOfTheRunDecays) {
  const ScheduleConfig schedule{.num_warmup_steps = 10, .num_decay_steps = 0, .min_lr_ratio = 0.0};
  EXPECT_NEAR(scheduled_lr(schedule, kPeak, 50, 10), kPeak, kRounding);
  EXPECT_NEAR(scheduled_lr(schedule, kPeak, 50, 30), kPeak / 2, kRounding);
  EXPECT_NEAR(scheduled_lr(schedule, kPeak, 50, 50), 0.0, kRounding);
  const double last = scheduled_lr(schedule, kPeak, 50, 49);
  EXPECT_GT(last, 0.0) << "the last update still counts";
  EXPECT_NEAR(last, kPeak * (1.0 + std::cos(M_PI * 39.0 / 40.0)) / 2, kRounding);
}

TEST(Schedule, WarmUpAsLongAsTheRunLeavesNoDecay) {
  const ScheduleConfig schedule{.num_warmup_steps = 5, .num_decay_steps = 0, .min_lr_ratio = 0.1};
  EXPECT_EQ(scheduled_lr(schedule, kPeak, 5, 4), kPeak);
  EXPECT_EQ(scheduled_lr(schedule, kPeak, 5, 5), kPeak);
  EXPECT_EQ(scheduled_lr(schedule, kPeak, 3, 2), kPeak * 3 / 5);
}

TEST(Schedule, NeverLeavesItsBoundsAndOnlyFallsAfterWarmUp) {
  const ScheduleConfig schedule{.num_warmup_steps = 7, .num_decay_steps = 31, .min_lr_ratio = 0.05};
  double before = std::numeric_limits<double>::infinity();
  for (int64_t step = 6; step < 60; ++step) {
    const double lr = scheduled_lr(schedule, kPeak, 60, step);
    EXPECT_LE(lr, before) << step;
    EXPECT_LE(lr, kPeak);
    EXPECT_GE(lr, 0.05 * kPeak - kRounding);
    before = lr;
  }
}

template <typename Config, typename Change>
std::string refused(Change change) {
  Config config;
  change(config);
  try {
    config.validate();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    return error.what();
  }
  return "";
}

TEST(OptimConfig, EveryKeyIsChecked) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto adamw = [](auto change) { return refused<AdamwConfig>(change); };
  const auto schedule = [](auto change) { return refused<ScheduleConfig>(change); };
  EXPECT_EQ(adamw([](auto&) {}), "");
  EXPECT_EQ(schedule([](auto&) {}), "");
  const struct {
    std::string message, key;
  } rows[] = {{adamw([](auto& c) { c.lr = -1; }), "adamw_kwargs.lr="},
              {adamw([&](auto& c) { c.lr = nan; }), "adamw_kwargs.lr="},
              {adamw([](auto& c) { c.betas = {0.9}; }), "adamw_kwargs.betas"},
              {adamw([](auto& c) { c.betas[1] = 1.0; }), "adamw_kwargs.betas"},
              {adamw([](auto& c) { c.eps = 0; }), "adamw_kwargs.eps="},
              {adamw([&](auto& c) { c.weight_decay = nan; }), "adamw_kwargs.weight_decay="},
              {schedule([](auto& c) { c.num_warmup_steps = -1; }), "lr_scheduler_kwargs.num_warmup_steps="},
              {schedule([](auto& c) { c.num_decay_steps = -1; }), "lr_scheduler_kwargs.num_decay_steps="},
              {schedule([](auto& c) { c.min_lr_ratio = 1.1; }), "lr_scheduler_kwargs.min_lr_ratio="}};
  for (const auto& row : rows) EXPECT_EQ(row.message.rfind(row.key, 0), 0u) << row.message << row.key;
}

}  // namespace
}  // namespace biomoe
