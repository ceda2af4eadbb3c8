// Plain loops over 32 columns, which the compiler turns into vectors: each float32 step is rounded once, in an order
// that is said. Bounds: of int4, four times 32 quotients.
#include "adapters/strip_codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "weights/half.h"

namespace kvarto {

namespace {

constexpr int32_t kInfinite = 0x7C00;  // a float16
constexpr float kDivisors[] = {-8.0F, -7.5F, -7.0F, -8.5F};

struct Codes {
    int32_t values[kCodeColumns];
};

int32_t magnitude_bits(float x) { return std::bit_cast<int32_t>(x) & 0x7FFFFFFF; }

// The bits of the largest magnitude, which are in the order of what they mean.
int32_t largest_bits(const float* x) {
    int32_t largest = 0;
    for (int32_t i = 0; i < kCodeColumns; ++i) largest = std::max(largest, magnitude_bits(x[i]));
    return largest;
}

// largest / divisor in float16, or the next larger one where that is too small by half a code.
uint16_t scale_bits(float largest, float divisor) {
    const uint16_t half = f32_to_f16(largest / divisor);
    const float reached = (std::fabs(divisor) + 0.5F) * std::fabs(f16_to_f32(half));
    return std::fabs(largest) > reached ? static_cast<uint16_t>(half + 1) : half;
}

// Quotients are below 128, so adding 3 * 2^22 rounds them to nearest even, into the low bits. Clamped as integers: of
// floats the compiler makes branches.
void quotients(const float* x, float scale, int32_t least, int32_t most, Codes& out) {
    constexpr float kShift = 0x1.8p23F;
    for (int32_t i = 0; i < kCodeColumns; ++i) {
        const int32_t code = std::bit_cast<int32_t>(x[i] / scale + kShift) - std::bit_cast<int32_t>(kShift);
        out.values[i] = std::min(std::max(code, least), most);
    }
}

// Sum of squares; halves, quarters, and so on, added up in this order.
float error_of(const float* x, const Codes& codes, float scale) {
    float squares[kCodeColumns];
    for (int32_t i = 0; i < kCodeColumns; ++i) {
        const float error = x[i] - static_cast<float>(codes.values[i]) * scale;
        squares[i] = error * error;
    }
    for (int32_t width = kCodeColumns / 2; width > 0; width /= 2)
        for (int32_t i = 0; i < width; ++i) squares[i] += squares[i + width];
    return squares[0];
}

bool encode_q8(const float* x, std::byte* out) {
    const float largest = std::bit_cast<float>(largest_bits(x));
    const uint16_t half = scale_bits(largest, 127.0F);
    if (half == kInfinite) return false;
    Codes codes = {};
    if (half != 0) quotients(x, f16_to_f32(half), -127, 127, codes);
    std::memcpy(out, &half, sizeof half);
    for (int32_t i = 0; i < kCodeColumns; ++i)
        out[kScaleBytes + i] = static_cast<std::byte>(codes.values[i]);
    return true;
}

bool encode_q4(const float* x, std::byte* out) {
    const int32_t bits = largest_bits(x);
    const float largest = *std::find_if(x, x + kCodeColumns, [bits](float v) { return magnitude_bits(v) == bits; });
    uint16_t best = 0;
    Codes best_codes = {}, codes;
    float least = std::numeric_limits<float>::infinity();
    for (const float divisor : kDivisors) {
        if (bits == 0) break;
        const uint16_t half = scale_bits(largest, divisor);
        if ((half & 0x7FFF) == kInfinite) {
            if (divisor == kDivisors[0]) return false;
            continue;
        }
        const float scale = f16_to_f32(half);
        quotients(x, scale, -8, 7, codes);
        const float error = error_of(x, codes, scale);
        if (error < least) best = half, best_codes = codes, least = error;
    }
    std::memcpy(out, &best, sizeof best);
    for (int32_t i = 0; i < kCodeColumns / 2; ++i) {
        const auto low = static_cast<uint32_t>(best_codes.values[i] + 8);
        const auto high = static_cast<uint32_t>(best_codes.values[16 + i] + 8);
        out[kScaleBytes + i] = static_cast<std::byte>(low | high << 4);
    }
    return true;
}

}  // namespace

bool encode(StripType type, const float* values, int64_t num_blocks, std::byte* out) {
    const auto encode_block = type == StripType::kQ8 ? encode_q8 : encode_q4;
    for (int64_t block = 0; block < num_blocks; ++block, values += kCodeColumns, out += block_bytes(type))
        if (!encode_block(values, out)) return false;
    return true;
}

}  // namespace kvarto
