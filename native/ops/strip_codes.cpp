// Sixteen blocks side by side, one to a lane: what is said of a block is then a loop over columns, and nothing adds up
// lanes. Loops over lanes are plain; the compiler turns them into vectors. Each float32 step is rounded once, in an order
// that is said. Bounds: of int4, four times 32 quotients to a block.
#include "ops/strip_codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "ops/transpose16.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int kLanes = 16;
constexpr uint16_t kInfinite = 0x7C00;  // a float16, without its sign
constexpr float kDivisors[] = {-8.0F, -7.5F, -7.0F, -8.5F};

using Floats = float[kLanes];
using Integers = int32_t[kLanes];

struct Columns {
    alignas(64) Floats values[kCodeColumns];
};

struct Codes {
    alignas(64) Integers values[kCodeColumns];
};

struct Scales {
    alignas(64) uint16_t bits[kLanes];
    alignas(64) Floats values;

    bool are_finite() const {
        return std::none_of(bits, bits + kLanes, [](uint16_t half) { return (half & 0x7FFF) == kInfinite; });
    }
};

// Zeros beside them where there are fewer than lanes.
void load(const float* values, int64_t num_blocks, Columns& out) {
    for (int half = 0; half < kCodeColumns; half += kLanes) {
        F32x16 rows[kLanes];
        for (int block = 0; block < kLanes; ++block)
            rows[block] = block < num_blocks ? F32x16::load(values + block * kCodeColumns + half) : F32x16::zero();
        transpose16(rows);
        for (int i = 0; i < kLanes; ++i) rows[i].store(out.values[half + i]);
    }
}

// Of each block the value of the largest magnitude, the first of several. Bits of magnitudes are in their order.
void find_largest(const Columns& x, Floats& largest) {
    alignas(64) Integers found = {};
    for (const Floats& column : x.values)
        for (int lane = 0; lane < kLanes; ++lane) {
            const int32_t bits = std::bit_cast<int32_t>(column[lane]);
            const int32_t is_larger = -static_cast<int32_t>((bits & 0x7FFFFFFF) > (found[lane] & 0x7FFFFFFF));
            found[lane] ^= (found[lane] ^ bits) & is_larger;
        }
    std::memcpy(largest, found, sizeof found);
}

// largest / divisor in float16, or the next larger one where that is too small by half a code; of 0 it is 0.
void find_scales(const Floats& largest, float divisor, Scales& out) {
    alignas(64) Floats quotients;
    for (int lane = 0; lane < kLanes; ++lane) quotients[lane] = largest[lane] / divisor + 0.0F;
    F32x16::load(quotients).store_f16(out.bits);
    F32x16::load_f16(out.bits).store(out.values);
    for (int lane = 0; lane < kLanes; ++lane) {
        const float reached = (std::fabs(divisor) + 0.5F) * std::fabs(out.values[lane]);
        out.bits[lane] = static_cast<uint16_t>(out.bits[lane] + (std::fabs(largest[lane]) > reached));
    }
    F32x16::load_f16(out.bits).store(out.values);
}

// Quotients are below 128, so adding 3 * 2^22 rounds them to nearest even, into the low bits. Where the scale is 0, all
// values are.
void find_codes(const Columns& x, const Scales& scales, int32_t least, int32_t most, Codes& out) {
    constexpr float kShift = 0x1.8p23F;
    alignas(64) Floats divisors;
    for (int lane = 0; lane < kLanes; ++lane) divisors[lane] = scales.values[lane] == 0.0F ? 1.0F : scales.values[lane];
    for (int column = 0; column < kCodeColumns; ++column)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float shifted = x.values[column][lane] / divisors[lane] + kShift;
            const int32_t code = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kShift);
            out.values[column][lane] = std::min(std::max(code, least), most);
        }
}

// Sums of squares; halves of the columns, quarters, and so on, added up in this order. NaN where a scale is infinite.
void find_errors(const Columns& x, const Codes& codes, const Scales& scales, Floats& out) {
    Columns squares;
    for (int column = 0; column < kCodeColumns; ++column)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float meant = static_cast<float>(codes.values[column][lane]) * scales.values[lane];
            const float error = x.values[column][lane] - meant;
            squares.values[column][lane] = error * error;
        }
    for (int width = kCodeColumns / 2; width > 0; width /= 2)
        for (int column = 0; column < width; ++column)
            for (int lane = 0; lane < kLanes; ++lane) squares.values[column][lane] += squares.values[column + width][lane];
    std::copy_n(squares.values[0], kLanes, out);
}

struct Encoded {
    Scales scales;
    Codes codes;
    alignas(64) Floats errors;

    // Takes over the blocks in which another one's error is less.
    void take_better(const Encoded& other) {
        alignas(64) Integers is_better;
        for (int lane = 0; lane < kLanes; ++lane) is_better[lane] = other.errors[lane] < errors[lane];
        for (int lane = 0; lane < kLanes; ++lane) {
            scales.bits[lane] = is_better[lane] ? other.scales.bits[lane] : scales.bits[lane];
            errors[lane] = is_better[lane] ? other.errors[lane] : errors[lane];
        }
        for (int column = 0; column < kCodeColumns; ++column)
            for (int lane = 0; lane < kLanes; ++lane) {
                int32_t& code = codes.values[column][lane];
                code = is_better[lane] ? other.codes.values[column][lane] : code;
            }
    }
};

// Four bytes of each block, which are numbers below 256, in a word.
void put_words(const Integers* bytes, int num_bytes, int64_t num_blocks, int32_t stride, std::byte* out) {
    for (int first = 0; first < num_bytes; first += 4, bytes += 4, out += 4) {
        alignas(64) Integers words;
        for (int lane = 0; lane < kLanes; ++lane)
            words[lane] = bytes[0][lane] | bytes[1][lane] << 8 | bytes[2][lane] << 16 |
                          static_cast<int32_t>(static_cast<uint32_t>(bytes[3][lane]) << 24);
        for (int64_t block = 0; block < num_blocks; ++block) std::memcpy(out + block * stride, &words[block], 4);
    }
}

void put(const Scales& scales, const Integers* bytes, int num_bytes, int64_t num_blocks, std::byte* out) {
    const int32_t stride = kScaleBytes + num_bytes;
    for (int64_t block = 0; block < num_blocks; ++block) std::memcpy(out + block * stride, &scales.bits[block], kScaleBytes);
    put_words(bytes, num_bytes, num_blocks, stride, out + kScaleBytes);
}

bool encode_q8(const float* values, int64_t num_blocks, std::byte* out) {
    Columns x;
    Codes codes;
    Scales scales;
    alignas(64) Floats largest;
    load(values, num_blocks, x);
    find_largest(x, largest);
    for (float& value : largest) value = std::fabs(value);
    find_scales(largest, 127.0F, scales);
    if (!scales.are_finite()) return false;
    find_codes(x, scales, -127, 127, codes);
    for (Integers& column : codes.values)
        for (int32_t& code : column) code &= 0xFF;
    put(scales, codes.values, kCodeColumns, num_blocks, out);
    return true;
}

void encode_q4_by(float divisor, const Columns& x, const Floats& largest, Encoded& out) {
    find_scales(largest, divisor, out.scales);
    find_codes(x, out.scales, -8, 7, out.codes);
    find_errors(x, out.codes, out.scales, out.errors);
}

bool encode_q4(const float* values, int64_t num_blocks, std::byte* out) {
    Columns x;
    Encoded best, other;
    alignas(64) Floats largest;
    load(values, num_blocks, x);
    find_largest(x, largest);
    encode_q4_by(kDivisors[0], x, largest, best);
    if (!best.scales.are_finite()) return false;
    for (const float divisor : {kDivisors[1], kDivisors[2], kDivisors[3]}) {
        encode_q4_by(divisor, x, largest, other);
        best.take_better(other);
    }
    Integers* const codes = best.codes.values;
    for (int column = 0; column < kCodeColumns / 2; ++column)
        for (int lane = 0; lane < kLanes; ++lane)
            codes[column][lane] = (codes[column][lane] + 8) | (codes[column + kCodeColumns / 2][lane] + 8) << 4;
    put(best.scales, codes, kCodeColumns / 2, num_blocks, out);
    return true;
}

}  // namespace

bool encode(StripType type, const float* values, int64_t num_blocks, std::byte* out) {
    const auto encode_some = type == StripType::kQ8 ? encode_q8 : encode_q4;
    for (int64_t first = 0; first < num_blocks; first += kLanes) {
        const int64_t here = std::min<int64_t>(num_blocks - first, kLanes);
        if (!encode_some(values + first * kCodeColumns, here, out + first * block_bytes(type))) return false;
    }
    return true;
}

}  // namespace kvarto::KVARTO_ISA
