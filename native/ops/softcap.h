// softcap * tanh(x / softcap), for scores and logits.
#pragma once

#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

// tanh to about 1e-7. Near 0 an odd polynomial, for the other form loses digits there; NaN stays NaN.
// Source: Cephes, tanhf.
inline F32x16 tanh(F32x16 x) {
    const F32x16 one = F32x16::set1(1.0F), square = x * x, size = abs(x);
    F32x16 p = F32x16::set1(-5.70498872745e-3F);
    for (float c : {2.06390887954e-2F, -5.37397155531e-2F, 1.33314422036e-1F, -3.33332819422e-1F})
        p = fma(p, square, F32x16::set1(c));
    const F32x16 near = fma(p * square, x, x);
    const F32x16 far = one - F32x16::set1(2.0F) / (exp(size + size) + one);
    const I32x16 sign = bits_of(x) & I32x16::set1(INT32_MIN);
    const I32x16 is_near = I32x16::zero() - shift_right<31>(bits_of(size - F32x16::set1(0.625F)));  // all ones, or 0
    const I32x16 is_far = I32x16::set1(-1) - is_near;
    return from_bits((bits_of(near) & is_near) | ((bits_of(far) | sign) & is_far));
}

inline F32x16 softcapped(F32x16 x, float softcap) {
    const F32x16 cap = F32x16::set1(softcap);
    return cap * tanh(x / cap);
}

}  // namespace kvarto::KVARTO_ISA
