// A row or two by vectors, with the very steps of the matrix tiles (linear_bf16.h), so that the bits are the same.
//
// Cost per group of a 4-bit panel: 128 vector operations to unpack 512 weights, 32 per row to multiply, two in a cycle:
// 80 cycles for one row. Reading the 320 bytes takes about 96.
#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <array>
#include <utility>

#include "ops/linear_bf16_unpack.h"
#include "ops/round_bf16.h"

namespace kvarto::KVARTO_ISA {

namespace {

// A group of one row as float32.
KVARTO_INLINE inline void load_group(const Rows& rows, int32_t row, int32_t group, float* out) {
    const std::byte* x = rows.bf16(row, group);
    _mm512_store_ps(out, widen_bf16(x));
    _mm512_store_ps(out + 16, widen_bf16(x + 32));
}

// Sums of one panel.
template <int num_rows> struct RowSums {
    F32x16 even[num_rows], odd[num_rows], total[num_rows];

    KVARTO_INLINE void start() {
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE { total[i] = F32x16::zero(); });
    }
    KVARTO_INLINE void start_group() {
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE { even[i] = odd[i] = F32x16::zero(); });
    }
    // Columns k and k + 1 of a group; k is even.
    KVARTO_INLINE void add_pair(const float (&x)[num_rows][kGroup], int k, F32x16 first, F32x16 second) {
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE {
            even[i] = fma(F32x16::set1(x[i][k]), first, even[i]);
            odd[i] = fma(F32x16::set1(x[i][k + 1]), second, odd[i]);
        });
    }
    KVARTO_INLINE void end_group() {
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE { total[i] = total[i] + (even[i] + odd[i]); });
    }
};

// A group of one panel, ready to be multiplied column by column.
template <Format format> struct GroupHere {
    ColumnCodes<format> codes;
    Affine<format> first, last;  // of the halves

    GroupHere(const Block<format>& block, int group)
        : codes(block, group), first(block, group, 0), last(block, group, Block<format>::kHalves - 1) {}
    template <int k> KVARTO_INLINE F32x16 weight() const {
        return cut((k < 16 ? first : last).of(codes.template column<k>()));
    }
};

// Panels side by side, column by column: each sum waits for the column before it, and others fill the time.
template <Format format, int num_rows, int panels> class Panels {
    using B = Block<format>;

public:
    Panels(const Part& part, const BF16Rows& rows, int32_t panel) : part_(part), rows_(rows), panel_(panel) {}

    void multiply() {
        const int64_t bytes = block_bytes(format, part_.group_size);
        const int64_t panel_stride = panel_bytes(format, part_.group_size, rows_.x.width);
        const std::byte* next = part_.data + panel_ * panel_stride;
        const int32_t in_block = B::groups(part_.group_size);
        RowSums<num_rows> sums[panels];
        for (auto& sum : sums) sum.start();
        for (int32_t column = 0; column < rows_.num_groups(); column += in_block, next += bytes)
            add_block(blocks_at(next, panel_stride, std::make_integer_sequence<int, panels>{}), column, sums);
        unrolled<panels>([&]<int p>() KVARTO_INLINE { write(sums[p], (panel_ + p) * kLanes); });
    }

private:
    template <int... p>
    std::array<B, panels> blocks_at(const std::byte* next, int64_t stride, std::integer_sequence<int, p...>) const {
        return {B(next + p * stride, part_.group_size)...};
    }
    template <int... p>
    static std::array<GroupHere<format>, panels> groups_at(const std::array<B, panels>& blocks, int group,
                                                           std::integer_sequence<int, p...>) {
        return {GroupHere<format>(blocks[p], group)...};
    }

    KVARTO_INLINE void add_block(const std::array<B, panels>& blocks, int32_t column,
                                 RowSums<num_rows> (&sums)[panels]) const {
        const int32_t in_block = B::groups(part_.group_size);
        for (int32_t group = 0; group < in_block; ++group) {
            alignas(64) float x[num_rows][kGroup];
            for (int32_t i = 0; i < num_rows; ++i) load_group(rows_.x, i, column + group, x[i]);
            asm("" : "+m"(x));  // elements are broadcast as they are loaded, not picked from registers
            const auto groups = groups_at(blocks, group, std::make_integer_sequence<int, panels>{});
            for (auto& sum : sums) sum.start_group();
            unrolled<kGroup / 2>([&]<int pair>() KVARTO_INLINE {
                unrolled<panels>([&]<int p>() KVARTO_INLINE {
                    sums[p].add_pair(x, 2 * pair, groups[p].template weight<2 * pair>(),
                                     groups[p].template weight<2 * pair + 1>());
                });
            });
            for (auto& sum : sums) sum.end_group();
        }
    }

    void write(const RowSums<num_rows>& sums, int32_t first_lane) const {
        const auto lanes = static_cast<__mmask16>((1U << std::min(part_.num_rows - first_lane, kLanes)) - 1);
        const __m512 bias = rows_.bias == nullptr ? _mm512_setzero_ps()
                                                  : _mm512_maskz_loadu_ps(lanes, rows_.bias + first_lane);
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE {
            const __m512 total = sums.total[i].v;
            _mm512_mask_storeu_ps(rows_.out + i * rows_.out_stride + first_lane, lanes,
                                  rows_.bias == nullptr ? total : _mm512_add_ps(total, bias));
        });
    }

    const Part& part_;
    const BF16Rows& rows_;
    int32_t panel_;
};

template <Format format, int num_rows>
void multiply(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    int32_t panel = first;
    if constexpr (num_rows == 1)
        for (; panel + 4 <= last; panel += 4) Panels<format, 1, 4>(part, rows, panel).multiply();
    for (; panel + 2 <= last; panel += 2) Panels<format, num_rows, 2>(part, rows, panel).multiply();
    if (panel < last) Panels<format, num_rows, 1>(part, rows, panel).multiply();
}

}  // namespace

void multiply_panels_bf16_by_rows(const Part& part, const BF16Rows& rows, int32_t first, int32_t last) {
    const DenormalsAreZero mode;
    with_format(part.format, [&]<Format format>() {
        if (rows.num_rows == 1)
            multiply<format, 1>(part, rows, first, last);
        else
            multiply<format, 2>(part, rows, first, last);
    });
}

}  // namespace kvarto::KVARTO_ISA

#endif
