// The device switch that every op ends with.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/ops/op_list.h"

#define BIOMOE_RUN_ON_DEVICE(name, ctx, args) \
  switch ((ctx).device) {                     \
    case ::biomoe::Device::kCpu:              \
      ::biomoe::cpu::name((ctx), (args));     \
      return;                                 \
    case ::biomoe::Device::kCuda:             \
      ::biomoe::cuda::name((ctx), (args));    \
      return;                                 \
  }
