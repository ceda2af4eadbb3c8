// Tiles of sixteen staged rows × panels of sixteen rows of weights.
//
// Panels are unpacked a chunk of columns at a time, once for all rows; what multiplies a tile with a group is one of
// linear_int8_amx.h and linear_int8_vectors.h.
#include "ops/linear_int8_panels.h"

#if defined(__AVX512VNNI__)

#include <algorithm>

#include "ops/linear_int8_amx.h"
#include "ops/linear_int8_vectors.h"
#include "ops/prefetch.h"

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
template <int num_rows> class OutTile {
public:
    OutTile(const Int8Rows& rows, const Part& part, int32_t tile, int32_t panel)
        : out_(rows.out + 16 * tile * rows.out_stride + panel * kLanes), stride_(rows.out_stride),
          num_filled_(std::min(rows.num_rows - 16 * tile, num_rows)),
          lanes_(static_cast<__mmask16>((1U << std::min(part.num_rows - panel * kLanes, kLanes)) - 1)),
          bias_(rows.bias != nullptr ? rows.bias + panel * kLanes : nullptr) {}

    // Stores leave in order, so each would wait for a line that is not near.
    void ask_for() const {
        for (int32_t i = 0; i < num_filled_; ++i) prefetch_to_write(out_ + i * stride_);
    }

    void load(__m512 (&totals)[num_rows]) const {
#pragma GCC unroll 16
        for (int i = 0; i < num_rows; ++i)
            totals[i] = i < num_filled_ ? _mm512_maskz_loadu_ps(lanes_, out_ + i * stride_) : _mm512_setzero_ps();
    }

    void add_bias(__m512 (&totals)[num_rows]) const {
        if (bias_ == nullptr) return;
        const __m512 bias = _mm512_maskz_loadu_ps(lanes_, bias_);
        for (__m512& total : totals) total = _mm512_add_ps(total, bias);
    }

    void store(const __m512 (&totals)[num_rows]) const {
#pragma GCC unroll 16
        for (int i = 0; i < num_rows; ++i)
            if (i < num_filled_) _mm512_mask_storeu_ps(out_ + i * stride_, lanes_, totals[i]);
    }

private:
    float* out_;
    int64_t stride_;
    int32_t num_filled_;
    __mmask16 lanes_;
    const float* bias_;
};

// One panel of a part, as the rows meet it.
template <Format format> struct Panel {
    const Part& part;
    const Int8Rows& rows;
    int32_t index;
    int64_t bytes = panel_bytes(format, part.group_size, rows.x.width);
    const std::byte* packed = part.data + index * bytes;
    int32_t num_groups = rows.x.width / kGroup;
    int64_t group_bytes = bytes / num_groups;

    using Weights = WeightGroup<Block<format>::kHalves>;

    void unpack(int32_t first, int32_t last, Weights* out) const {
        unpack_chunk<format>(packed, part.group_size, first, last, out);
    }

    // What the next panel has in place of a group of this one.
    void ask_for_next(int32_t group) const {
        const std::byte* next = packed + bytes + group * group_bytes;
        for (int64_t byte = 0; byte < group_bytes; byte += 64) prefetch_to_second_level(next + byte);
    }

    const StagedGroup* staged(int32_t tile) const {
        return reinterpret_cast<const StagedGroup*>(rows.staged) + tile * num_groups;
    }
};

// Groups [first, last), which `weights` begins with, of the rows of a tile.
template <Format format, int num_rows>
void multiply_tile(const Panel<format>& panel, const WeightGroup<Block<format>::kHalves>* weights, int32_t first,
                   int32_t last, int32_t tile) {
    const OutTile<num_rows> out(panel.rows, panel.part, tile, panel.index);
    out.ask_for();
    __m512 totals[num_rows] = {};
    if (first > 0) out.load(totals);
    add_groups<format, num_rows>(panel.staged(tile) + first, weights, last - first, totals, [&](int32_t group) {
        if (tile == 0) panel.ask_for_next(first + group);
    });
    if (last == panel.num_groups) out.add_bias(totals);
    out.store(totals);
}

// f.operator()<n>(), where a tile's rows are rounded up to n.
template <class F> void with_rows(int32_t num_rows, F f) {
    if constexpr (kHasShortTiles) {
        if (num_rows <= 4) return f.template operator()<4>();
        if (num_rows <= 8) return f.template operator()<8>();
        if (num_rows <= 12) return f.template operator()<12>();
    }
    f.template operator()<16>();
}

template <Format format> void multiply_panel(const Panel<format>& panel) {
    const Int8Rows& rows = panel.rows;
    typename Panel<format>::Weights weights[kChunk];
    for (int32_t first = 0; first < panel.num_groups; first += kChunk) {
        const int32_t last = std::min(first + kChunk, panel.num_groups);
        panel.unpack(first, last, weights);
        for (int32_t tile = 0; tile < rows.num_tiles(); ++tile)
            with_rows(rows.num_rows - 16 * tile, [&]<int num_rows>() {
                multiply_tile<format, num_rows>(panel, weights, first, last, tile);
            });
    }
}

}  // namespace

void multiply_panels_by_tiles(const Part& part, const Int8Rows& rows, int32_t first, int32_t last) {
    with_format(part.format, [&]<Format format>() {
        begin_tiles<Block<format>::kHalves>();
        for (int32_t panel = first; panel < last; ++panel) multiply_panel<format>({part, rows, panel});
        end_tiles();
    });
}

}  // namespace kvarto::KVARTO_ISA

#else

namespace kvarto::KVARTO_ISA {

void multiply_panels_by_tiles(const Part&, const Int8Rows&, int32_t, int32_t) {}

}  // namespace kvarto::KVARTO_ISA

#endif
