// The pointwise functions, on sixteen lanes.
#pragma once

#include "core/ops.h"
#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

// x / (1 + e^-x)
inline F32x16 silu(F32x16 x) {
    return x / (F32x16::set1(1.0F) + exp(F32x16::zero() - x));
}

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / π) (x + 0.044715 x³), as x / (1 + e^-2u): no cancellation far below 0.
inline F32x16 gelu_tanh(F32x16 x) {
    const F32x16 cubic = fma(x * x, F32x16::set1(0.044715F), F32x16::set1(1.0F));
    const F32x16 twice = x * cubic * F32x16::set1(1.59576912F);
    return x / (F32x16::set1(1.0F) + exp(F32x16::zero() - twice));
}

// x Φ(x) = max(x, 0) - |x| erfc(|x| / √2) / 2, where erfc(z) = e^-z² t P(t), t = 1 / (1 + 0.45 z). P is a least-squares
// fit on Chebyshev's nodes for z up to 10.5, exact to 1.5e-8; beyond it e^-z² has vanished.
inline F32x16 gelu(F32x16 x) {
    const F32x16 size = abs(x);
    const F32x16 z = size * F32x16::set1(0.70710678F);
    const F32x16 t = F32x16::set1(1.0F) / fma(z, F32x16::set1(0.45F), F32x16::set1(1.0F));
    F32x16 p = F32x16::set1(-0.0350003243F);
    for (float c : {0.156678094F, -0.222826716F, 0.0425169374F, 0.0567820504F, 0.0800102452F, 0.18803649F, 0.225779012F,
                    0.254150932F, 0.253873264F})
        p = fma(p, t, F32x16::set1(c));
    const F32x16 erfc = exp(F32x16::zero() - z * z) * t * p;
    return max(F32x16::zero(), x) - size * erfc * F32x16::set1(0.5F);
}

inline F32x16 activated(Activation activation, F32x16 x) {
    switch (activation) {
        case Activation::kSilu: return silu(x);
        case Activation::kGeluTanh: return gelu_tanh(x);
        case Activation::kGelu: return gelu(x);
    }
    __builtin_unreachable();
}

}  // namespace kvarto::KVARTO_ISA
