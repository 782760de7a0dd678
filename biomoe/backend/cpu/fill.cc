#include "biomoe/ops/fill.h"

#include <cmath>
#include <cstring>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/work_size.h"

namespace biomoe::cpu {

void fill_zero(Context& ctx, const FillZeroArgs& args) {
  auto* bytes = static_cast<unsigned char*>(args.x.data);
  parallel_ranges(ctx, static_cast<int64_t>(args.x.bytes()), kMinElementsPerThread * 4, [&](Range range) {
    std::memset(bytes + range.begin, 0, static_cast<size_t>(range.count()));
  });
}

void count_nonfinite(Context&, const CountNonfiniteArgs& args) {
  const float* x = args.x.f32();
  int64_t count = 0;
  for (int64_t i = 0; i < args.x.num_elements(); ++i) count += std::isfinite(x[i]) ? 0 : 1;
  *args.count_1.i64() = count;
}

}  // namespace biomoe::cpu
