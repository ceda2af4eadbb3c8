// Rows by sixteen lanes, whatever their width: the last vector is filled up with zeros, or stored in part.
#pragma once

#include <cstring>

#include "core/rows.h"
#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kWide = 16;

// p[0 .. count - 1], then zeros; 0 < count ≤ 16.
inline F32x16 load_first(const float* p, int32_t count) {
    if (count == kWide) return F32x16::load(p);
    float lanes[kWide] = {};
    std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
    return F32x16::load(lanes);
}

inline void store_first(F32x16 x, float* p, int32_t count) {
    if (count == kWide) return x.store(p);
    float lanes[kWide];
    x.store(lanes);
    std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof(float));
}

// Calls `f(first element, how many)` for each vector of a row.
template <class F> inline void each_vector(int32_t width, F f) {
    int32_t i = 0;
    for (; i + kWide <= width; i += kWide) f(i, kWide);
    if (i < width) f(i, width - i);
}

// Sum of `f(first element, how many)` over a row: four vectors of partial sums take turns, and are added in order, so
// that the bits depend on the width alone.
template <class F> inline float sum_of(int32_t width, F f) {
    F32x16 parts[4] = {F32x16::zero(), F32x16::zero(), F32x16::zero(), F32x16::zero()};
    int32_t i = 0;
    for (; i + 4 * kWide <= width; i += 4 * kWide)
        for (int32_t turn = 0; turn < 4; ++turn) parts[turn] = f(i + turn * kWide, kWide, parts[turn]);
    for (int32_t turn = 0; i < width; i += kWide, ++turn)
        parts[turn] = f(i, width - i < kWide ? width - i : kWide, parts[turn]);
    return sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

}  // namespace kvarto::KVARTO_ISA
