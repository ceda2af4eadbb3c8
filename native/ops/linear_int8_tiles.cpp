// Sixteen staged rows × sixteen rows of weights × 32 columns in one matrix instruction.
//
// Panels are unpacked a chunk of columns at a time, once for all rows. A group's exact sums come out as a tile of
// int32, go through the first-level cache, and are scaled into sixteen accumulators.
//
// Cost per 16 × 16 × 32 products: about 16 cycles to multiply, 16 to store a tile, and 24 to 32 of vectors to scale it
// (3 or 4 operations per row, two in a cycle). Vectors and the matrix unit hardly overlap, so the bound is their sum.
#include "ops/linear_int8_panels.h"

#if defined(__AMX_INT8__)

#include <algorithm>

#include "simd/tiles.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kChunk = 24;  // groups unpacked together, a multiple of a K-quant's 8: 15 KiB

// A group of sixteen weight rows.
template <int num_halves> struct WeightGroup {
    alignas(64) int8_t quads[8][64];  // signed
    float scales[num_halves][16];
    float minimum[16];
};

// Tiles 0 and 1: sums. 2 and 3: codes of rows. 4 and 5: codes of weights. Q6_K takes half a group at a time.
template <int num_halves> void configure() {
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile)
        config.set(tile, tile < 4 ? 16 : 8 / num_halves, tile == 2 || tile == 3 ? kGroup / num_halves : 64);
    configure_tiles(config);
}

// Columns [32 · first, 32 · last) of a panel.
template <Format format>
void unpack_chunk(const std::byte* panel, int32_t group_size, int32_t first, int32_t last,
                  WeightGroup<Block<format>::kHalves>* out) {
    using B = Block<format>;
    const int32_t groups = B::groups(group_size);
    const __m512i offset = _mm512_set1_epi8(B::kOffset);
    for (int32_t column = first; column < last;) {
        const B block(panel + column / groups * block_bytes(format, group_size), group_size);
        for (int32_t group = column % groups; group < groups && column < last; ++group, ++column, ++out) {
            Quads quads;
            block.codes(group, quads);
            for (int j = 0; j < 8; ++j) _mm512_store_si512(out->quads[j], _mm512_sub_epi8(quads[j].v, offset));
            for (int half = 0; half < B::kHalves; ++half) block.scale(group, half).store(out->scales[half]);
            if constexpr (B::kHasMinimum) block.minimum(group).store(out->minimum);
        }
    }
}

template <int turn, int num_halves, int half>
[[gnu::always_inline]] inline void multiply_tile(const StagedGroup& rows, const WeightGroup<num_halves>& weights,
                                                 int32_t (&sums)[16][16]) {
    constexpr int first = half * kGroup / num_halves;
    zero_tile<turn>();
    load_tile<2 + turn>(&rows.codes[0][first], kGroup);
    load_tile<4 + turn>(weights.quads[half * 8 / num_halves], 64);
    multiply_tiles_int8<turn, 2 + turn, 4 + turn>();
    store_tile<turn>(sums, 64);
    if (!rows.is_fine) return;
    alignas(64) int32_t fine_sums[16][16];
    zero_tile<turn>();
    load_tile<2 + turn>(&rows.fine_codes[0][first], kGroup);
    multiply_tiles_int8<turn, 2 + turn, 4 + turn>();
    store_tile<turn>(fine_sums, 64);
    for (int i = 0; i < 16; ++i) {
        const __m512i coarse = _mm512_slli_epi32(_mm512_load_si512(sums[i]), 7);
        _mm512_store_si512(sums[i], _mm512_add_epi32(coarse, _mm512_load_si512(fine_sums[i])));
    }
}

template <int num_halves, int half, bool has_minimum>
[[gnu::always_inline]] inline void scale_tile(const int32_t (&sums)[16][16], const StagedGroup& rows,
                                              const WeightGroup<num_halves>& weights, __m512 (&totals)[16]) {
    const __m512 scale = _mm512_load_ps(weights.scales[half]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[i]));
        totals[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[i])), both, totals[i]);
    }
    if constexpr (has_minimum && half == num_halves - 1) {
        const __m512 minimum = _mm512_load_ps(weights.minimum);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) totals[i] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows.sums[i]), totals[i]);
    }
}

// Groups [0, count) of one tile of rows and one panel, into sixteen accumulators.
// Inlined, so that the accumulators stay in registers.
template <Format format>
[[gnu::always_inline]] inline void add_groups(const StagedGroup* rows,
                                              const WeightGroup<Block<format>::kHalves>* weights, int32_t count,
                                              __m512 (&totals)[16]) {
    using B = Block<format>;
    constexpr int num_halves = B::kHalves;
    alignas(64) int32_t sums[2][16][16];
    if constexpr (num_halves == 2) {
        multiply_tile<0, 2, 0>(rows[0], weights[0], sums[0]);
        for (int32_t group = 0; group < count; ++group) {
            multiply_tile<1, 2, 1>(rows[group], weights[group], sums[1]);
            scale_tile<2, 0, false>(sums[0], rows[group], weights[group], totals);
            if (group + 1 < count) multiply_tile<0, 2, 0>(rows[group + 1], weights[group + 1], sums[0]);
            scale_tile<2, 1, false>(sums[1], rows[group], weights[group], totals);
        }
    } else {
        multiply_tile<0, 1, 0>(rows[0], weights[0], sums[0]);
        for (int32_t group = 0; group < count; group += 2) {
            if (group + 1 < count) multiply_tile<1, 1, 0>(rows[group + 1], weights[group + 1], sums[1]);
            scale_tile<1, 0, B::kHasMinimum>(sums[0], rows[group], weights[group], totals);
            if (group + 1 == count) break;
            if (group + 2 < count) multiply_tile<0, 1, 0>(rows[group + 2], weights[group + 2], sums[0]);
            scale_tile<1, 0, B::kHasMinimum>(sums[1], rows[group + 1], weights[group + 1], totals);
        }
    }
}

// Where the sums of a tile of rows and a panel lie between chunks, and in the end.
struct OutTile {
    float* out;
    int64_t stride;
    int32_t num_rows;
    __mmask16 lanes;

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
        configure<Block<format>::kHalves>();
        for (int32_t panel = first; panel < last; ++panel) multiply_panel<format>(part, rows, panel);
        release_tiles();
    });
}

}  // namespace kvarto::KVARTO_ISA

#else

namespace kvarto::KVARTO_ISA {

void multiply_panels_by_tiles(const Part&, const Int8Rows&, int32_t, int32_t) {}

}  // namespace kvarto::KVARTO_ISA

#endif
