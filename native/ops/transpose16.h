// Sixteen vectors of sixteen lanes, turned over: lane j of vector i becomes lane i of vector j.
#pragma once

#include <utility>

#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

#if defined(__AVX512F__)

// 64 shuffles: pairs of lanes, quads of lanes, then blocks of 128 bits twice.
inline void transpose16(F32x16 (&x)[16]) {
    __m512 pairs[16], quads[16], blocks[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
        pairs[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; ++h) {
            const __m512d a = _mm512_castps_pd(pairs[i + h]), b = _mm512_castps_pd(pairs[i + h + 2]);
            quads[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            quads[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int j = 0; j < 4; ++j)
        for (int half = 0; half < 2; ++half) {
            const __m512 a = quads[8 * half + j], b = quads[8 * half + 4 + j];
            blocks[8 * half + j] = _mm512_shuffle_f32x4(a, b, 0x88);
            blocks[8 * half + 4 + j] = _mm512_shuffle_f32x4(a, b, 0xDD);
        }
    for (int j = 0; j < 4; ++j)
        for (int odd = 0; odd < 2; ++odd) {
            const __m512 a = blocks[4 * odd + j], b = blocks[8 + 4 * odd + j];
            x[4 * odd + j].v = _mm512_shuffle_f32x4(a, b, 0x88);
            x[8 + 4 * odd + j].v = _mm512_shuffle_f32x4(a, b, 0xDD);
        }
}

#elif defined(__AVX2__)

inline void transpose8(__m256 (&x)[8]) {
    __m256 pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int h = 0; h < 2; ++h) {
            quads[i + 2 * h] = _mm256_shuffle_ps(pairs[i + h], pairs[i + h + 2], 0x44);
            quads[i + 2 * h + 1] = _mm256_shuffle_ps(pairs[i + h], pairs[i + h + 2], 0xEE);
        }
    for (int j = 0; j < 4; ++j) {
        x[j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
        x[4 + j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
    }
}

inline void transpose16(F32x16 (&x)[16]) {
    __m256 quarters[2][2][8];  // [rows][lanes]
    for (int i = 0; i < 16; ++i) {
        quarters[i / 8][0][i % 8] = x[i].lo;
        quarters[i / 8][1][i % 8] = x[i].hi;
    }
    for (auto& rows : quarters)
        for (auto& lanes : rows) transpose8(lanes);
    for (int i = 0; i < 8; ++i) {
        x[i] = {quarters[0][0][i], quarters[1][0][i]};
        x[8 + i] = {quarters[0][1][i], quarters[1][1][i]};
    }
}

#else

inline void transpose16(F32x16 (&x)[16]) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < i; ++j) std::swap(x[i].v[j], x[j].v[i]);
}

#endif

}  // namespace kvarto::KVARTO_ISA
