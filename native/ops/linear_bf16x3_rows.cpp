// One row by vectors, with the very steps of the matrix tiles (linear_bf16x3.h), so that the bits are the same.
//
// Cost per group of a panel of float32: 128 vector operations for parts and 192 to multiply, two in a cycle: 160 cycles.
// Reading its 2 KiB takes more than twice as long.
#include "ops/linear_bf16x3.h"

#if defined(__AMX_BF16__)

#include "ops/linear_bf16x3_parts.h"
#include "ops/round_bf16.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int64_t kAhead = 1024;  // bytes that are asked for before their turn
constexpr int32_t kPanels = 4;    // that are read side by side

// The parts of a group of the row as float32.
struct RowGroup {
    alignas(64) float parts[kRowParts][kGroup];

    KVARTO_INLINE RowGroup(const BF16x3Rows& rows, int32_t group) {
        unrolled<kRowParts>([&]<int part>() KVARTO_INLINE {
            const std::byte* x = rows.first.x.bf16(0, group) + part * rows.part_bytes;
            _mm512_store_ps(parts[part], widen_bf16(x));
            _mm512_store_ps(parts[part] + 16, widen_bf16(x + 32));
        });
        asm("" : "+m"(parts));  // elements are broadcast as they are loaded, not picked from registers
    }
};

template <int parts> KVARTO_INLINE inline void split(F32x16 weight, F32x16 (&out)[parts]) {
    unrolled<parts>([&]<int part>() KVARTO_INLINE {
        out[part] = part + 1 < parts ? cut(weight) : weight;
        if constexpr (part + 1 < parts) weight = weight - out[part];
    });
}

// Adds a group of a panel, its products in their order. The `next` group to be added is in memory elsewhere.
template <Format format>
KVARTO_INLINE inline void add_group(const std::byte* pairs, const std::byte* next, const RowGroup& x, F32x16& sum) {
    constexpr int parts = kWeightParts<format>, count = num_products<parts>();
    constexpr int64_t in_group = kGroup / 2 * kPairBytes<format> - kAhead;
    F32x16 even[count], odd[count];
    unrolled<count>([&]<int i>() KVARTO_INLINE { even[i] = odd[i] = F32x16::zero(); });
    unrolled<kGroup / 2>([&]<int pair>() KVARTO_INLINE {
        constexpr int64_t at = pair * kPairBytes<format>;
        for (int64_t line = 0; line < kPairBytes<format>; line += 64)
            _mm_prefetch(at < in_group ? pairs + kAhead + at + line : next + at - in_group + line, _MM_HINT_T0);
        const auto [first, second] = columns_at<format>(pairs + at);
        F32x16 w[2][parts];
        split(first, w[0]);
        split(second, w[1]);
        unrolled<count>([&]<int i>() KVARTO_INLINE {
            constexpr PartPair product = products_of<parts>()[i];
            const float* row = x.parts[product.row] + 2 * pair;
            even[i] = fma(F32x16::set1(row[0]), w[0][product.weight], even[i]);
            odd[i] = fma(F32x16::set1(row[1]), w[1][product.weight], odd[i]);
        });
    });
    unrolled<count>([&]<int i>() KVARTO_INLINE { sum = sum + (even[i] + odd[i]); });
}

void write(const Part& part, const BF16Rows& rows, int32_t panel, F32x16 sum) {
    const int32_t first_lane = panel * kLanes;
    const auto lanes = static_cast<__mmask16>((1U << std::min(part.num_rows - first_lane, kLanes)) - 1);
    if (rows.bias != nullptr) sum = sum + F32x16{_mm512_maskz_loadu_ps(lanes, rows.bias + first_lane)};
    _mm512_mask_storeu_ps(rows.out + first_lane, lanes, sum.v);
}

// Panels [panel, panel + panels), before others `that_follow`.
template <Format format, int32_t panels>
void multiply(const Part& part, const BF16x3Rows& rows, int32_t panel, bool that_follow) {
    constexpr int64_t group_bytes = kGroup / 2 * kPairBytes<format>;
    const int64_t stride = panel_bytes(format, 0, rows.first.x.width);
    const std::byte* first = part.data + panel * stride;
    F32x16 sums[panels];
    unrolled<panels>([&]<int p>() KVARTO_INLINE { sums[p] = F32x16::zero(); });
    for (int64_t start = 0; start < stride; start += group_bytes) {
        const RowGroup x(rows, static_cast<int32_t>(start / group_bytes));
        const std::byte* here = first + start;
        const std::byte* after = start + group_bytes < stride ? here + group_bytes
                                 : that_follow                ? first + panels * stride
                                                              : here;
        unrolled<panels>([&]<int p>() KVARTO_INLINE {
            add_group<format>(here + p * stride, p + 1 < panels ? here + (p + 1) * stride : after, x, sums[p]);
        });
    }
    unrolled<panels>([&]<int p>() KVARTO_INLINE { write(part, rows.first, panel + p, sums[p]); });
}

}  // namespace

void multiply_panels_bf16x3_by_row(const Part& part, const BF16x3Rows& rows, int32_t first, int32_t last) {
    const DenormalsAreZero mode;
    with_float_format(part.format, [&]<Format format>() {
        int32_t panel = first;
        for (; panel + kPanels <= last; panel += kPanels)
            multiply<format, kPanels>(part, rows, panel, panel + kPanels < last);
        for (; panel < last; ++panel) multiply<format, 1>(part, rows, panel, panel + 1 < last);
    });
}

}  // namespace kvarto::KVARTO_ISA

#endif
