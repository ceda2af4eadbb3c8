// Tiles of sixteen staged rows × panels of sixteen rows of weights.
//
// Panels are unpacked a chunk of columns at a time, once for all rows; what multiplies a tile with a group is one of
// linear_int8_amx.h and linear_int8_vectors.h.
#include "ops/linear_int8_panels.h"

#if defined(__AVX512VNNI__)

#include <algorithm>

#include "ops/linear_int8_amx.h"
#include "ops/linear_int8_vectors.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kChunk = 24;  // groups unpacked together, a multiple of a K-quant's 8: 15 KiB

// Columns [32 · first, 32 · last) of a panel.
template <Format format>
void unpack_chunk(const std::byte* panel, int32_t group_size, int32_t first, int32_t last,
                  WeightGroup<Block<format>::kHalves>* out) {
    using B = Block<format>;
    const int32_t groups = B::groups(group_size);
    // Where they stay unsigned, signed codes get 128 more.
    const __m512i shift = _mm512_set1_epi8(kHasSignedWeights ? -B::kOffset : B::kBits == 8 ? -128 : 0);
    for (int32_t column = first; column < last;) {
        const B block(panel + column / groups * block_bytes(format, group_size), group_size);
        for (int32_t group = column % groups; group < groups && column < last; ++group, ++column, ++out) {
            Quads quads;
            block.codes(group, quads);
            for (int j = 0; j < 8; ++j) _mm512_store_si512(out->quads[j], _mm512_add_epi8(quads[j].v, shift));
            for (int half = 0; half < B::kHalves; ++half) block.scale(group, half).store(out->scales[half]);
            if constexpr (B::kHasMinimum) block.minimum(group).store(out->minimum);
        }
    }
}

// Where the sums of a tile of rows and a panel lie between chunks, and in the end.
struct OutTile {
    float* out;
    int64_t stride;
    int32_t num_rows;
    __mmask16 lanes;

    // Stores leave in order, so each would wait for a line that is not near.
    void ask_for() const {
        for (int32_t i = 0; i < num_rows; ++i) __builtin_prefetch(out + i * stride, 1);
    }

    void load(__m512 (&totals)[16]) const {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
            totals[i] = i < num_rows ? _mm512_maskz_loadu_ps(lanes, out + i * stride) : _mm512_setzero_ps();
    }

    void store(const __m512 (&totals)[16]) const {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
            if (i < num_rows) _mm512_mask_storeu_ps(out + i * stride, lanes, totals[i]);
    }
};

template <Format format> void multiply_panel(const Part& part, const Int8Rows& rows, int32_t panel) {
    using B = Block<format>;
    const std::byte* packed = part.data + panel * panel_bytes(format, part.group_size, rows.x.width);
    const int32_t num_groups = rows.x.width / kGroup, first_lane = panel * kLanes;
    const auto lanes = static_cast<__mmask16>((1U << std::min(part.num_rows - first_lane, kLanes)) - 1);
    const auto* staged = reinterpret_cast<const StagedGroup*>(rows.staged);
    WeightGroup<B::kHalves> weights[kChunk];
    for (int32_t first = 0; first < num_groups; first += kChunk) {
        const int32_t last = std::min(first + kChunk, num_groups);
        unpack_chunk<format>(packed, part.group_size, first, last, weights);
        for (int32_t tile = 0; tile < rows.num_tiles(); ++tile) {
            const OutTile out{rows.out + 16 * tile * rows.out_stride + first_lane, rows.out_stride,
                              std::min(rows.num_rows - 16 * tile, 16), lanes};
            out.ask_for();
            __m512 totals[16] = {};
            if (first > 0) out.load(totals);
            add_groups<format>(staged + tile * num_groups + first, weights, last - first, totals);
            if (last == num_groups && rows.bias != nullptr) {
                const __m512 bias = _mm512_maskz_loadu_ps(lanes, rows.bias + first_lane);
                for (__m512& total : totals) total = _mm512_add_ps(total, bias);
            }
            out.store(totals);
        }
    }
}

}  // namespace

void multiply_panels_by_tiles(const Part& part, const Int8Rows& rows, int32_t first, int32_t last) {
    with_format(part.format, [&]<Format format>() {
        begin_tiles<Block<format>::kHalves>();
        for (int32_t panel = first; panel < last; ++panel) multiply_panel<format>(part, rows, panel);
        end_tiles();
    });
}

}  // namespace kvarto::KVARTO_ISA

#else

namespace kvarto::KVARTO_ISA {

void multiply_panels_by_tiles(const Part&, const Int8Rows&, int32_t, int32_t) {}

}  // namespace kvarto::KVARTO_ISA

#endif
