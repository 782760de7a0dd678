#include "biomoe/ops/adamw.h"

#include <span>

#include "biomoe/backend/cuda/device/mx_weights.cuh"
#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/tile.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {
namespace {

constexpr int kThreads = 256;
// Blocks of AdamW take one vector a thread and end: many small ones come closer to the rate of a copy than
// few that go on, by 2 to 4 %.
constexpr int64_t kAdamwBlockElements = kThreads * kVector;

// Segments of one launch, and which blocks belong to each. It travels as a parameter of the kernel (24 KB of
// the 32 that there are), so that nothing need be kept, copied or allocated, also in a recorded step.
struct SegmentTable {
  struct Entry {
    int64_t begin;
    int64_t end;
    int32_t first_block;
    int32_t decay;
  };
  static constexpr int kMax = static_cast<int>(kSegmentsOfLaunch);
  Entry entries[kMax];
  int count = 0;
  int blocks = 0;
};

// A block's elements, which begin and end at multiples of kVector where the segment does not.
struct BlockRange {
  int64_t begin, end;
  bool decay;
};

__device__ __forceinline__ BlockRange range_of_block(const SegmentTable& table, int64_t block_groups) {
  const int block = static_cast<int>(blockIdx.x);
  int low = 0, high = table.count;  // the entry is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.entries[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const SegmentTable::Entry& entry = table.entries[low];
  const int64_t first = entry.begin / kVector + (block - entry.first_block) * block_groups;
  const int64_t last = (entry.end + kVector - 1) / kVector;
  return {max(entry.begin, first * kVector), min(entry.end, min(last, first + block_groups) * kVector),
          entry.decay != 0};
}

// vector(i) for every kVector elements from i, a multiple of kVector; single(i) for the ones before and
// after.
template <int kUnroll, typename Vector, typename Single>
__device__ __forceinline__ void for_each_element(const BlockRange& range, const Vector& vector,
                                                 const Single& single) {
  const int64_t first = min(range.end, (range.begin + kVector - 1) / kVector * kVector);
  const int64_t last = max(first, range.end / kVector * kVector);
#pragma unroll kUnroll
  for (int64_t i = first + threadIdx.x * kVector; i < last; i += kThreads * kVector) vector(i);
  if (range.begin + threadIdx.x < first) single(range.begin + threadIdx.x);
  if (last + threadIdx.x < range.end) single(last + threadIdx.x);
}

// Calls launch(table, index of its first segment) for every table that the segments fill. Segments for which
// `elsewhere` (empty, or one a segment) has something count as empty.
template <typename Elsewhere, typename Launch>
void for_each_table(std::span<const ArenaSegment> segments, std::span<const Elsewhere> elsewhere,
                    int64_t block_groups, const Launch& launch) {
  for (size_t base = 0; base < segments.size(); base += SegmentTable::kMax) {
    SegmentTable table;
    int64_t blocks = 0;
    const size_t end = std::min(segments.size(), base + SegmentTable::kMax);
    for (size_t i = base; i < end; ++i) {
      ArenaSegment segment = segments[i];
      if (!elsewhere.empty() && elsewhere[i]) segment.count = 0;
      // An empty one has no block; the search for a block then ends at the next that has.
      table.entries[table.count++] = {segment.begin, segment.begin + segment.count,
                                      static_cast<int32_t>(blocks), segment.decay};
      blocks += segment_blocks(segment.begin, segment.count, block_groups * kVector);
    }
    table.blocks = static_cast<int>(blocks);
    launch(table, base);
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads) void squares_kernel(const __grid_constant__ SegmentTable table,
                                                           const T* x, double* partials) {
  const BlockRange range = range_of_block(table, kSquaresBlockElements / kVector);
  double sum = 0.0, other = 0.0;
  const auto add = [&](int64_t i) {
    const Pack<T, kVector> pack = load<kVector, Reuse::kStream>(x + i);
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      const auto a = static_cast<double>(pack[j]), b = static_cast<double>(pack[j + 1]);
      sum += a * a;
      other += b * b;
    }
  };
  const auto add_one = [&](int64_t i) {
    const auto a = static_cast<double>(to_float(x[i]));
    sum += a * a;
  };
  for_each_element<4>(range, add, add_one);
  sum = block_sum(sum + other);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// A block a segment.
__global__ __launch_bounds__(kThreads) void segment_sums_kernel(const __grid_constant__ SegmentTable table,
                                                                const double* partials, double* sums) {
  const int segment = static_cast<int>(blockIdx.x);
  const int end = segment + 1 < table.count ? table.entries[segment + 1].first_block : table.blocks;
  double sum = 0.0;
  for (int i = table.entries[segment].first_block + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    sum += partials[i];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[segment] = sum;
}

// Partial sums of one launch, a block each; a parameter of the kernel, as SegmentTable.
struct PartialTable {
  struct Entry {
    const float* values;
    int64_t count;
    int64_t segment;
  };
  static constexpr int kMax = 1024;
  Entry entries[kMax];
  int count = 0;
};

__global__ __launch_bounds__(kThreads) void partial_sums_kernel(const __grid_constant__ PartialTable table,
                                                                double* sums) {
  const PartialTable::Entry entry = table.entries[blockIdx.x];
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < entry.count; i += kThreads) sum += static_cast<double>(entry.values[i]);
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[entry.segment] = sum;
}

void add_partials(const Context& ctx, const SumSquaresArgs& args) {
  PartialTable table;
  const auto launch = [&] {
    if (table.count == 0) return;
    partial_sums_kernel<<<static_cast<unsigned>(table.count), kThreads, 0, stream_of(ctx)>>>(
        table, args.sums_S.f64());
    check_launch("sum_squares");
    table.count = 0;
  };
  for (size_t i = 0; i < args.partials.size(); ++i) {
    const TensorView& partials = args.partials[i];
    if (!partials) continue;
    if (table.count == PartialTable::kMax) launch();
    table.entries[table.count++] = {partials.f32(), partials.num_elements(), static_cast<int64_t>(i)};
  }
  launch();
}

__global__ __launch_bounds__(kThreads) void clip_kernel(const double* sums, int64_t count,
                                                        const double* loss_sums, double max_norm,
                                                        double* norm_out, double* factor, double* apply) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  const double norm = sqrt(sum);
  bool finite = isfinite(norm);
  for (int i = 0; loss_sums && i < 3; ++i) finite = finite && isfinite(loss_sums[i]);
  *norm_out = norm;
  *factor = max_norm > 0 && norm > max_norm ? max_norm / (norm + 1e-6) : 1.0;
  *apply = finite ? 1.0 : 0.0;
}

struct Rule {
  double beta1, beta2, eps, weight_decay;
};

struct Coefficients {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  float grad_scale;
  float decay;         // lr * weight_decay, or 0
  float step_size;     // lr / (1 - beta1^step)
  float inverse_root;  // 1 / sqrt(1 - beta2^step)
};

__device__ Coefficients coefficients(const Rule& rule, const double* update, bool decay) {
  return {static_cast<float>(rule.beta1),
          static_cast<float>(1.0 - rule.beta1),
          static_cast<float>(rule.beta2),
          static_cast<float>(1.0 - rule.beta2),
          static_cast<float>(rule.eps),
          static_cast<float>(update[kGradScale]),
          decay ? static_cast<float>(update[kLr] * rule.weight_decay) : 0.0f,
          static_cast<float>(update[kLr] / update[kCorrection1]),
          static_cast<float>(1.0 / sqrt(update[kCorrection2]))};
}

// Every operation is spelled out, so that all kernels round alike.
__device__ __forceinline__ float updated(const Coefficients& c, float param, float grad, float& exp_avg,
                                         float& exp_avg_sq) {
  const float g = __fmul_rn(grad, c.grad_scale);
  exp_avg = __fmaf_rn(c.beta1, exp_avg, __fmul_rn(c.one_minus_beta1, g));
  exp_avg_sq = __fmaf_rn(c.beta2, exp_avg_sq, __fmul_rn(c.one_minus_beta2, __fmul_rn(g, g)));
  const float kept = __fmaf_rn(-c.decay, param, param);
  const float root = __fmaf_rn(__fsqrt_rn(exp_avg_sq), c.inverse_root, c.eps);
  return __fmaf_rn(-c.step_size, __fdiv_rn(exp_avg, root), kept);
}

template <int V>
__device__ __forceinline__ Pack<bf16, V> pack_bits(const uint16_t (&bits)[V]) {
  Pack<bf16, V> pack;
  if constexpr (V == 1) {
    pack.value = __ushort_as_bfloat16(bits[0]);
  } else {
#pragma unroll
    for (int i = 0; i < V / 2; ++i) pack.words[i] = unsigned{bits[2 * i]} | unsigned{bits[2 * i + 1]} << 16;
  }
  return pack;
}

enum class Master { kNone, kF32, kRemainder };

template <typename W, typename G, typename S>
struct Pointers {
  W* weights;
  float* master;
  uint16_t* remainder;
  const G* grad;
  S* exp_avg;
  S* exp_avg_sq;
};

// V elements as they are before the update.
template <int V, Master kMaster, typename W, typename G, typename S>
struct Elements {
  Pack<G, V> grad;
  Pack<S, V> exp_avg, exp_avg_sq;
  Pack<std::conditional_t<kMaster == Master::kF32, float, W>, V> param;
  Pack<bf16, V> remainder;  // 16-bit words, of which Pack needs only the bits
};

// From `at`, with V = 1 at the ends of a segment.
template <int V, Master kMaster, typename W, typename G, typename S>
__device__ __forceinline__ Elements<V, kMaster, W, G, S> load_elements(const Pointers<W, G, S>& p,
                                                                       int64_t at) {
  constexpr Reuse kOnce = Reuse::kStream;
  Elements<V, kMaster, W, G, S> e;
  e.grad = load<V, kOnce>(p.grad + at);
  e.exp_avg = load<V, kOnce>(p.exp_avg + at);
  e.exp_avg_sq = load<V, kOnce>(p.exp_avg_sq + at);
  if constexpr (kMaster == Master::kF32) {
    e.param = load<V, kOnce>(p.master + at);
  } else {
    e.param = load<V, kOnce>(p.weights + at);
  }
  if constexpr (kMaster == Master::kRemainder) {
    e.remainder = load<V, kOnce>(reinterpret_cast<const bf16*>(p.remainder) + at);
  }
  return e;
}

// Returns the new weights, as they are stored.
template <int V, Master kMaster, typename W, typename G, typename S>
__device__ __forceinline__ Pack<W, V> update_elements(const Pointers<W, G, S>& p, const Coefficients& c,
                                                      int64_t at, const Elements<V, kMaster, W, G, S>& e) {
  constexpr Reuse kOnce = Reuse::kStream;
  float param[V], exp_avg[V], exp_avg_sq[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    param[j] = e.param[j];
    if constexpr (kMaster == Master::kRemainder) {
      param[j] = join_master(static_cast<uint16_t>(__float_as_uint(e.param[j]) >> 16),
                             static_cast<uint16_t>(__float_as_uint(e.remainder[j]) >> 16));
    }
    exp_avg[j] = e.exp_avg[j];
    exp_avg_sq[j] = e.exp_avg_sq[j];
    param[j] = updated(c, param[j], e.grad[j], exp_avg[j], exp_avg_sq[j]);
  }
  store<kOnce>(p.exp_avg + at, exp_avg);
  store<kOnce>(p.exp_avg_sq + at, exp_avg_sq);
  Pack<W, V> weights;
  if constexpr (kMaster == Master::kNone) {
    weights.set(param);
  } else {
    uint16_t high[V], low[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const SplitMaster split = split_master(param[j]);
      high[j] = split.weight;
      low[j] = split.remainder;
    }
    weights = pack_bits<V>(high);
    if constexpr (kMaster == Master::kRemainder) {
      store<kOnce>(reinterpret_cast<bf16*>(p.remainder) + at, pack_bits<V>(low));
    } else {
      store<kOnce>(p.master + at, param);
    }
  }
  store<kOnce>(p.weights + at, weights);
  return weights;
}

template <Master kMaster, typename W, typename G, typename S>
__global__ __launch_bounds__(kThreads) void adamw_kernel(const __grid_constant__ SegmentTable table,
                                                         Pointers<W, G, S> p, Rule rule,
                                                         const double* update) {
  __shared__ Coefficients shared;
  if (update[kApply] == 0.0) return;
  const BlockRange range = range_of_block(table, kAdamwBlockElements / kVector);
  if (threadIdx.x == 0) shared = coefficients(rule, update, range.decay);
  __syncthreads();
  const Coefficients c = shared;
  for_each_element<1>(
      range, [&](int64_t i) { update_elements(p, c, i, load_elements<kVector, kMaster>(p, i)); },
      [&](int64_t i) { update_elements(p, c, i, load_elements<1, kMaster>(p, i)); });
}

// Where codes of weights [experts, out, in] go (see WeightCodes).
struct CodePointers {
  ScaleRule rule;
  uint8_t* codes;
  uint8_t* transposed;
  float* scales;
  int64_t out, in;
};

CodePointers code_pointers(const WeightCodes& codes) {
  const Shape& shape = codes.codes_EOI.shape;
  return {codes.rule,
          data_of<uint8_t>(codes.codes_EOI),
          data_of<uint8_t>(codes.transposed_EIO),
          codes.scales_NB.f32(),
          shape[1],
          shape[2]};
}

// A tile of 128 x 128 of a segment's weights, which is one block of their codes. The pointers are to the
// segment. The new weights wait for their scale in shared memory, each where its own thread finds it again:
// in registers they would leave room for fewer blocks on a multiprocessor. Codes leave the cache first, as
// all else here: 3 % faster than where they stay.
template <Master kMaster, typename G, typename S>
__global__ __launch_bounds__(kTileThreads, 3) void adamw_codes_kernel(Pointers<bf16, G, S> p, CodePointers to,
                                                                      Rule rule, bool decay,
                                                                      const double* update) {
  using Tile = TileShape<128>;
  __shared__ Coefficients c;
  __shared__ union {
    Pack<bf16, 8> held[8][kTileThreads];
    TransposedTile<> transposed;
  } memory;
  const auto tiles = static_cast<unsigned>(to.in / 128);
  const int64_t tile_row = blockIdx.x / tiles, tile_column = blockIdx.x % tiles;
  const int64_t first = (tile_row * 128 + Tile::row(0)) * to.in + tile_column * 128 + Tile::vector() * 8;
  const auto at = [&](int i) { return first + Tile::step(i) * to.in; };
  if (update[kApply] == 0.0) return;
  if (threadIdx.x == 0) c = coefficients(rule, update, decay);
  __syncthreads();
  Pack<bf16, 8> amax{};
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const Pack<bf16, 8> weights = update_elements(p, c, at(i), load_elements<8, kMaster>(p, at(i)));
    raise(amax, weights);
    memory.held[i][threadIdx.x] = weights;
  }
  const BlockScale scale = block_scale(block_max(largest_magnitude(amax)), Fp8Format::kE4M3, to.rule);
  const int64_t expert = tile_row * 128 / to.out;
  if (threadIdx.x == 0) to.scales[(tile_row + expert) * tiles + tile_column] = scale.inverse;
  float multiply[8];
#pragma unroll
  for (float& value : multiply) value = scale.multiply;
  uint2 codes[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Pack<bf16, 8> weights = memory.held[i][threadIdx.x];
    float values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = weights[j];
    codes[i / 4][i % 4] = encode_eight<Fp8Format::kE4M3>(values, multiply);
    __stcs(reinterpret_cast<uint2*>(to.codes + at(i)), codes[i / 4][i % 4]);
  }
  if (!to.transposed) return;
  __syncthreads();
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    memory.transposed.put(Tile::vector(), Tile::quad(4 * quad), codes[quad]);
  }
  __syncthreads();
  uint8_t* transposed =
      to.transposed + (expert * to.in + tile_column * 128 - expert) * to.out + tile_row * 128;
  memory.transposed.write<Reuse::kStream>(128, 128, [&](int column) { return transposed + column * to.out; });
}

// A tile of a segment's weights, and what MX codes of them stand for. Otherwise as adamw_codes_kernel.
template <Master kMaster, typename G, typename S>
__global__ __launch_bounds__(kTileThreads, 3) void adamw_mx_kernel(Pointers<bf16, G, S> p,
                                                                   MxWeightPointers<bf16> to, Rule rule,
                                                                   bool decay, const double* update) {
  __shared__ Coefficients c;
  __shared__ Pack<bf16, 8> held[8][kTileThreads];
  const MxTilePart part(to.in);
  if (update[kApply] == 0.0) return;
  if (threadIdx.x == 0) c = coefficients(rule, update, decay);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    Pack<bf16, 8> weights{};
    if (part.present) weights = update_elements(p, c, part.at(i), load_elements<8, kMaster>(p, part.at(i)));
    held[i][threadIdx.x] = weights;
  }
  write_mx_tile<Reuse::kStream>(to, part, [&](int i) { return held[i][threadIdx.x]; });
}

void check_aligned(const char* op, std::initializer_list<TensorView> views) {
  for (const TensorView& view : views) {
    BM_CHECK(reinterpret_cast<uintptr_t>(view.data) % 16 == 0,
             "{}: an arena does not begin at a multiple of 16 bytes", op);
  }
}

// body(pointers) of the types of the gradients and the moments.
template <typename W, typename Body>
void with_pointers(const AdamwArgs& args, const Body& body) {
  with_type(args.grad_A.dtype, [&](auto grad_type) {
    using G = decltype(grad_type);
    with_type(args.exp_avg_A.dtype, [&](auto state_type) {
      using S = decltype(state_type);
      body(Pointers<W, G, S>{data_of<W>(args.weights_A), args.master_A.f32(),
                             data_of<uint16_t>(args.remainder_A), data_of<G>(args.grad_A),
                             data_of<S>(args.exp_avg_A), data_of<S>(args.exp_avg_sq_A)});
    });
  });
}

// body(std::integral_constant<Master, M>), for bf16 weights.
template <typename Body>
void with_master(const AdamwArgs& args, const Body& body) {
  if (args.master_A) {
    body(std::integral_constant<Master, Master::kF32>{});
  } else if (args.remainder_A) {
    body(std::integral_constant<Master, Master::kRemainder>{});
  } else {
    body(std::integral_constant<Master, Master::kNone>{});
  }
}

Rule rule_of(const AdamwArgs& args) {
  return {args.beta1, args.beta2, args.eps, args.weight_decay};
}

template <Master kMaster, typename W>
void launch_adamw(const Context& ctx, const AdamwArgs& args, const SegmentTable& table) {
  with_pointers<W>(args, [&](const auto& p) {
    adamw_kernel<kMaster><<<static_cast<unsigned>(table.blocks), kThreads, 0, stream_of(ctx)>>>(
        table, p, rule_of(args), args.update_5.f64());
  });
  check_launch("adamw");
}

// The arguments with arenas that begin where the segment does.
AdamwArgs of_segment(const AdamwArgs& args, const ArenaSegment& segment) {
  AdamwArgs own = args;
  for (TensorView* view :
       {&own.weights_A, &own.master_A, &own.remainder_A, &own.grad_A, &own.exp_avg_A, &own.exp_avg_sq_A}) {
    if (*view) *view = view->rows(segment.begin, segment.count);
  }
  return own;
}

// Of all of `args`, which is of one segment.
void launch_adamw_codes(const Context& ctx, const AdamwArgs& args, bool decay, const WeightCodes& codes) {
  const int64_t tiles =
      codes.mx ? mx_tiles(codes.mx) : codes.codes_EOI.num_elements() / (kScaleBlock * kScaleBlock);
  if (tiles == 0) return;
  const auto blocks = static_cast<unsigned>(tiles);
  with_master(args, [&](auto master) {
    constexpr Master kMaster = decltype(master)::value;
    with_pointers<bf16>(args, [&](const auto& p) {
      if (codes.mx) {
        adamw_mx_kernel<kMaster><<<blocks, kTileThreads, 0, stream_of(ctx)>>>(
            p, mx_weight_pointers<bf16>(codes.mx), rule_of(args), decay, args.update_5.f64());
      } else {
        adamw_codes_kernel<kMaster><<<blocks, kTileThreads, 0, stream_of(ctx)>>>(
            p, code_pointers(codes), rule_of(args), decay, args.update_5.f64());
      }
    });
  });
  check_launch("adamw");
}

}  // namespace

void sum_squares(Context& ctx, const SumSquaresArgs& args) {
  check_aligned("sum_squares", {args.x_A});
  Arena& scratch = scratch_of(ctx, "sum_squares");
  for_each_table(args.segments, args.partials, kSquaresBlockElements / kVector,
                 [&](const SegmentTable& table, size_t first) {
                   const ArenaScope scope(scratch);
                   double* partials = scratch.tensor(DType::kF64, Shape{table.blocks}).f64();
                   if (table.blocks > 0) {
                     with_type(args.x_A.dtype, [&](auto type) {
                       using T = decltype(type);
                       squares_kernel<T>
                           <<<static_cast<unsigned>(table.blocks), kThreads, 0, stream_of(ctx)>>>(
                               table, data_of<T>(args.x_A), partials);
                     });
                     check_launch("sum_squares");
                   }
                   segment_sums_kernel<<<static_cast<unsigned>(table.count), kThreads, 0, stream_of(ctx)>>>(
                       table, partials, args.sums_S.f64() + first);
                   check_launch("sum_squares");
                 });
  add_partials(ctx, args);
}

void clip_factor(Context& ctx, const ClipFactorArgs& args) {
  clip_kernel<<<1, kThreads, 0, stream_of(ctx)>>>(args.sums_S.f64(), args.sums_S.num_elements(),
                                                  args.loss_sums_3.f64(), args.max_norm, args.norm_1.f64(),
                                                  args.factor_1.f64(), args.apply_1.f64());
  check_launch("clip_factor");
}

void adamw(Context& ctx, const AdamwArgs& args) {
  check_aligned("adamw", {args.weights_A, args.master_A, args.remainder_A, args.grad_A, args.exp_avg_A,
                          args.exp_avg_sq_A});
  const bool half = args.weights_A.dtype == DType::kBF16;
  BM_CHECK(half || !(args.master_A || args.remainder_A), "adamw: F32 weights are their own master");
  for (size_t i = 0; i < args.codes.size(); ++i) {
    const ArenaSegment& segment = args.segments[i];
    if (args.codes[i]) launch_adamw_codes(ctx, of_segment(args, segment), segment.decay, args.codes[i]);
  }
  for_each_table(
      args.segments, args.codes, kAdamwBlockElements / kVector, [&](const SegmentTable& table, size_t) {
        if (table.blocks == 0) return;
        if (!half) return launch_adamw<Master::kNone, float>(ctx, args, table);
        with_master(args,
                    [&](auto master) { launch_adamw<decltype(master)::value, bf16>(ctx, args, table); });
      });
}

}  // namespace biomoe::cuda
