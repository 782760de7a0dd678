// What GPUs can do at most, from their makers' data sheets.
#pragma once

#include <optional>
#include <string_view>

namespace biomoe {

// Floating-point operations a second of dense BF16 products with fp32 sums on the tensor cores of the GPU
// that the driver calls `name`; no value for one that is not in the table, or for a part of one (MIG).
std::optional<double> peak_bf16_flops(std::string_view name);

}  // namespace biomoe
