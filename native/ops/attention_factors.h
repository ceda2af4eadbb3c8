// Weights of keys, and what sums are scaled with where a row's largest score has grown: powers of a number up to 0.
#pragma once

#include <cfloat>

#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

// Powers of e. Exactly 1 at 0, exactly 0 far below: taking away the least result of `exp` changes nothing above 1e-30.
struct ExactFactor {
    F32x16 least = exp(F32x16::set1(-FLT_MAX));
    F32x16 operator()(F32x16 x) const { return exp(x) - least; }
};

#if defined(__AVX512F__)

// 2^x for x up to 0, exactly 1 at 0 and 0 at -inf: 2^floor(x) times a polynomial of what is left, in [0, 1). To 1e-4
// for weights, which keep eight bits, and to 1e-7 for factors; least relative error, by Lawson's iteration.
template <class... Coefficients> inline __m512 exp2_of(__m512 x, float last, Coefficients... lower) {
    const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(last);
    ((p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(lower))), ...);
    return _mm512_scalef_ps(p, x);  // takes the floor by itself
}
inline __m512 weight_of(__m512 x) { return exp2_of(x, 0.077067042F, 0.227644991F, 0.695116786F, 1.0F); }

struct FastFactor {
    F32x16 operator()(F32x16 x) const {
        return {exp2_of(x.v, 1.86713007e-3F, 9.01703032e-3F, 5.57999131e-2F, 0.24016445F, 0.693151312F, 1.0F)};
    }
};

#endif

}  // namespace kvarto::KVARTO_ISA
