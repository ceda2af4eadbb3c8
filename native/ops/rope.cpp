// Rotation of q and k heads by position, halves apart.
//
// Cosines and sines are computed once per token and serve all its heads: about 30 operations on float64 per pair of
// dims, against 6 on float32 per pair and head. The angle is the float32 product position * inv_freq, as models define
// it; its cosine and sine are exact to the last bit of float32 but for rare ties, the same on every machine.
#include <cmath>

#include "ops/lanes.h"
#include "ops/row_ops.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kMaxPairs = 256;  // of a head of 512 dims; longer ones go piece by piece

// Cosine and sine of float32 angles below 2^30, in float64: the angle less the nearest multiple of π/2, polynomials of
// the rest, and the quadrant's swaps and signs. Written so that compilers turn it into vectors.
void rotation(const float* inv_freq, int32_t num_pairs, int32_t position, float factor, float* cos, float* sin) {
    constexpr double kTwoOverPi = 0.63661977236758134308, kRounder = 6755399441055744.0;  // 1.5 * 2^52
    constexpr double kHalfPi = 1.57079632679489655800, kHalfPiRest = 6.12323399573676603587e-17;
    for (int32_t i = 0; i < num_pairs; ++i) {
        const double angle = static_cast<float>(position) * inv_freq[i];
        const double shifted = angle * kTwoOverPi + kRounder;  // its lowest bits are the quadrant
        const double turns = shifted - kRounder;
        const double r = (angle - turns * kHalfPi) - turns * kHalfPiRest;
        const double r2 = r * r;
        // Taylor's series to r^13 and r^14: the first term left out is below 1e-12 at π/4.
        const double s = r + r * r2 * (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 + r2 * (1.0 / 362880 +
                         r2 * (-1.0 / 39916800 + r2 * (1.0 / 6227020800.0))))));
        const double c = 1.0 + r2 * (-0.5 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 + r2 * (1.0 / 40320 +
                         r2 * (-1.0 / 3628800 + r2 * (1.0 / 479001600.0 - r2 * (1.0 / 87178291200.0)))))));
        int64_t quadrant;
        std::memcpy(&quadrant, &shifted, sizeof quadrant);
        const double cosine = (quadrant & 1) != 0 ? s : c, sine = (quadrant & 1) != 0 ? c : s;
        cos[i] = static_cast<float>(((quadrant + 1) & 2) != 0 ? -cosine : cosine) * factor;
        sin[i] = static_cast<float>((quadrant & 2) != 0 ? -sine : sine) * factor;
    }
}

// Every product and sum is rounded by itself, as the reference does it.
void rotate(float* low, float* high, const float* cos, const float* sin, int32_t num_pairs) {
    each_vector(num_pairs, [&](int32_t i, int32_t count) {
        const F32x16 a = load_first(low + i, count), b = load_first(high + i, count);
        const F32x16 c = load_first(cos + i, count), s = load_first(sin + i, count);
        store_first(a * c - b * s, low + i, count);
        store_first(b * c + a * s, high + i, count);
    });
}

}  // namespace

void rope(const RopeOp& op, const StepView& step, int64_t first_row, int64_t last_row) {
    const auto num_pairs = static_cast<int32_t>(op.inv_freq.size());
    const int32_t num_heads = op.heads.num_qo_heads + op.heads.num_kv_heads;
    alignas(64) float cos[kMaxPairs], sin[kMaxPairs];
    for (int64_t row = first_row; row < last_row; ++row) {
        for (int32_t first = 0; first < num_pairs; first += kMaxPairs) {
            const int32_t count = num_pairs - first < kMaxPairs ? num_pairs - first : kMaxPairs;
            rotation(op.inv_freq.data() + first, count, step.positions[row], op.attention_factor, cos, sin);
            float* head = op.qkv.f32(row) + first;
            for (int32_t h = 0; h < num_heads; ++h, head += op.heads.head_dim)
                rotate(head, head + num_pairs, cos, sin, count);
        }
    }
}

}  // namespace kvarto::KVARTO_ISA
