// A group of sixteen weight rows as tiles of rows meet it: unpacked once for all of them. Needs AVX-512.
#pragma once

#include "ops/linear_int8.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

template <int num_halves> struct WeightGroup {
    alignas(64) int8_t quads[8][64];  // signed, or with the offset still in them: see kHasSignedWeights
    float scales[num_halves][16];
    float minimum[16];
};

// To rows' accumulators, each minimum times what the row's group adds up to.
template <int num_halves, int num_rows>
[[gnu::always_inline]] inline void add_minima(const StagedGroup& rows, const WeightGroup<num_halves>& weights,
                                              __m512 (&totals)[num_rows]) {
    const __m512 minimum = _mm512_load_ps(weights.minimum);
#pragma GCC unroll 16
    for (int i = 0; i < num_rows; ++i) totals[i] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows.sums[i]), totals[i]);
}

}  // namespace kvarto::KVARTO_ISA
