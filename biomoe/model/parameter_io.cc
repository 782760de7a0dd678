#include "biomoe/model/parameter_io.h"

#include <cstring>

#include "biomoe/ops/adamw.h"
#include "biomoe/ops/device.h"

namespace biomoe {
namespace {

void convert(const float* from, int64_t count, DType dtype, unsigned char* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* bits = reinterpret_cast<uint16_t*>(to);
  const bool remainder = dtype == DType::kU16;
  for (int64_t i = 0; i < count; ++i) {
    const SplitMaster split = split_master(from[i]);
    bits[i] = remainder ? split.remainder : split.weight;
  }
}

void convert(const unsigned char* from, DType dtype, int64_t count, float* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = float_from_bf16(bits[i]);
}

// A parameter as rows that move as one.
struct Rows {
  explicit Rows(const ParamSpec& spec)
      : count(spec.shape.rank() == 3 ? spec.shape[0] * spec.shape[1] : 1),
        width(spec.num_elements() / count) {}
  int64_t count, width;
};

}  // namespace

StateArena whole_arena(const ParamSpec& spec, const TensorView& arena_A) {
  return {arena_A, {.stretches = {{.count = spec.num_elements(), .place = spec.held}}}};
}

bool ParameterIo::interleaved(const ParamSpec& spec) const {
  return types_.gate_up_interleave > 0 && spec.name.ends_with("gate_up_proj");
}

int64_t ParameterIo::hub_row(const ParamSpec& spec, int64_t row) const {
  if (!interleaved(spec)) return row;
  const int64_t block = types_.gate_up_interleave, rows = spec.shape[1], half = rows / 2;
  const int64_t expert = row / rows, r = row % rows, pair = r / (2 * block), within = r % (2 * block);
  const int64_t f = pair * block + within % block;
  return expert * rows + (within < block ? f : half + f);
}

void ParameterIo::convert_to_buffer(const ParamSpec& spec, const float* values, DType dtype) {
  BM_CHECK(dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kU16, "{}: no {} arena",
           spec.name, dtype_name(dtype));
  const size_t element = dtype_size(dtype);
  buffer_.resize(static_cast<size_t>(spec.num_elements()) * element);
  const Rows rows(spec);
#pragma omp parallel for num_threads(ctx_.num_threads) schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    convert(values + hub_row(spec, row) * rows.width, rows.width, dtype,
            buffer_.data() + static_cast<size_t>(row * rows.width) * element);
  }
}

void ParameterIo::write_sync(const ParamSpec& spec, const float* values, const TensorView& arena_A) {
  write_state_sync(spec, values, whole_arena(spec, arena_A));
}

void ParameterIo::write_state_sync(const ParamSpec& spec, const float* values, const StateArena& state) {
  convert_to_buffer(spec, values, state.arena_A.dtype);
  const size_t element = dtype_size(state.arena_A.dtype);
  const StateStretch& own = state.owners.own();
  copy_to_device(
      ctx_, static_cast<unsigned char*>(state.arena_A.data) + static_cast<size_t>(own.place) * element,
      buffer_.data() + static_cast<size_t>(own.begin) * element, static_cast<size_t>(own.count) * element);
  device_wait_sync(ctx_);
}

const unsigned char* ParameterIo::fetch_sync(const ParamSpec& spec, const TensorView& arena_A,
                                             std::vector<unsigned char>& buffer) {
  if (ctx_.device == Device::kCpu) {
    return static_cast<const unsigned char*>(arena_A.data) +
           static_cast<size_t>(spec.held) * dtype_size(arena_A.dtype);
  }
  return fetch_state_sync(spec, whole_arena(spec, arena_A), buffer);
}

const unsigned char* ParameterIo::fetch_state_sync(const ParamSpec& spec, const StateArena& state,
                                                   std::vector<unsigned char>& buffer) {
  const size_t element = dtype_size(state.arena_A.dtype);
  const StateStretch& own = state.owners.own();
  buffer.resize(static_cast<size_t>(spec.num_elements()) * element);
  copy_to_host(
      ctx_, buffer.data() + static_cast<size_t>(own.begin) * element,
      static_cast<const unsigned char*>(state.arena_A.data) + static_cast<size_t>(own.place) * element,
      static_cast<size_t>(own.count) * element);
  device_wait_sync(ctx_);
  if (!state.copies || !interleaved(spec)) return buffer.data();
  Context host;
  for (size_t owner = 0; owner < state.owners.stretches.size(); ++owner) {
    const StateStretch& stretch = state.owners.stretches[owner];
    state.copies->broadcast(host,
                            TensorView(buffer.data() + static_cast<size_t>(stretch.begin) * element,
                                       DType::kU8, Shape{stretch.count * static_cast<int64_t>(element)}),
                            static_cast<int>(owner), "the optimiser's state");
  }
  return buffer.data();
}

void ParameterIo::convert_rows(const ParamSpec& spec, const unsigned char* source, DType dtype,
                               float* values) const {
  const size_t element = dtype_size(dtype);
  const Rows rows(spec);
#pragma omp parallel for num_threads(ctx_.num_threads) schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    convert(source + static_cast<size_t>(row * rows.width) * element, dtype, rows.width,
            values + hub_row(spec, row) * rows.width);
  }
}

void ParameterIo::read_sync(const ParamSpec& spec, const TensorView& arena_A, float* values) {
  convert_rows(spec, fetch_sync(spec, arena_A, buffer_), arena_A.dtype, values);
}

void ParameterIo::read_state_sync(const ParamSpec& spec, const StateArena& state, float* values) {
  convert_rows(spec, fetch_state_sync(spec, state, buffer_), state.arena_A.dtype, values);
}

void ParameterIo::read_masters_sync(const ParamSpec& spec, const StateArena& weights,
                                    const StateArena& remainders, float* values) {
  BM_CHECK(weights.arena_A.dtype == DType::kBF16 && remainders.arena_A.dtype == DType::kU16,
           "{}: masters of {} and {}", spec.name, dtype_name(weights.arena_A.dtype),
           dtype_name(remainders.arena_A.dtype));
  const auto* high = reinterpret_cast<const uint16_t*>(fetch_state_sync(spec, weights, buffer_));
  const auto* low = reinterpret_cast<const uint16_t*>(fetch_state_sync(spec, remainders, remainders_));
  const Rows rows(spec);
#pragma omp parallel for num_threads(ctx_.num_threads) schedule(static)
  for (int64_t row = 0; row < rows.count; ++row) {
    float* to = values + hub_row(spec, row) * rows.width;
    for (int64_t i = 0; i < rows.width; ++i) {
      const int64_t at = row * rows.width + i;
      to[i] = join_master(high[at], low[at]);
    }
  }
}

}  // namespace biomoe
