// How the loops over one row are compiled.
#pragma once

// A function that works on one row is compiled once and called from everywhere. Inlined into both arms of
// parallel_ranges, g++ vectorises a `#pragma omp simd` loop in one and not in the other: slower there, and,
// for a reduction, another order of summation, so that the result would depend on the number of threads.
#define BIOMOE_ROW_KERNEL [[gnu::noinline]]
