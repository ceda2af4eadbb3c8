#include "ops/logits_summary.h"

#include <limits>

#include "ops/lanes.h"
#include "simd/mask16.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Like load_first, but filled up with `filling`.
F32x16 load_filled(const float* p, int32_t count, float filling) {
    if (count == kWide) return F32x16::load(p);
    float lanes[kWide];
    F32x16::set1(filling).store(lanes);
    std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
    return F32x16::load(lanes);
}

// The first place of `value`, which is there.
int32_t place_of(float value, const float* x, int32_t count) {
    const F32x16 wanted = F32x16::set1(value);
    for (int32_t i = 0;; i += kWide) {
        const int32_t here = count - i < kWide ? count - i : kWide;
        const uint32_t found = equal(load_filled(x + i, here, kLowest), wanted);
        if (found != 0) return i + std::countr_zero(found);
    }
}

float sum_exp(const float* x, int32_t count, float largest) {
    F32x16 total = F32x16::zero();
    const F32x16 shift = F32x16::set1(largest);
    each_vector(count, [&](int32_t i, int32_t here) {
        if (here == kWide) {
            total = total + exp(F32x16::load(x + i) - shift);
        } else {
            float terms[kWide];
            exp(load_first(x + i, here) - shift).store(terms);
            total = total + load_first(terms, here);
        }
    });
    return sum(total);
}

}  // namespace

ChunkSummary summarise(const float* x, int32_t count, int32_t first_id, bool needs_sum) {
    F32x16 top = F32x16::set1(kLowest);
    uint32_t nan = 0;
    each_vector(count, [&](int32_t i, int32_t here) {
        const F32x16 value = load_filled(x + i, here, kLowest);
        top = max(value, top);
        nan |= is_nan(value);
    });
    if (nan != 0) return {std::numeric_limits<float>::quiet_NaN(), first_id, 0.0F};
    const float most = largest(top);
    const int32_t id = first_id + place_of(most, x, count);
    return {most, id, needs_sum && std::isfinite(most) ? sum_exp(x, count, most) : 0.0F};
}

}  // namespace kvarto::KVARTO_ISA
