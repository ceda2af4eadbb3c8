// A few rows at a time, each group of weights unpacked once for all of them, and asked for before its turn.
//
// Cost per group of 32 columns and 16 rows of weights, in vector operations of 16 lanes: to unpack, 12 (4 bits); per
// activation row, 8 for the products and 3 or 4 for the scales, and 9 more where the row's group has fine codes. With
// one row that is 12 to 17 cycles for 288-320 bytes, so memory is the bound; from about four rows on it is these
// operations.
#include "ops/linear_int8_dot.h"
#include "ops/linear_int8_panels.h"
#include "ops/prefetch.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int64_t kBytesAhead = 2048;  // of weights; 4096 would meet the same places of the cache as what is read

#if defined(__AVX512F__)
constexpr int kMostRows = 8;  // and eight quads, of 32 registers
#else
constexpr int kMostRows = 4;
#endif

template <Format format, int num_rows> struct RowSums {
    using B = Block<format>;
    const QuantisedRow (&rows)[num_rows];
    F32x16 sums[num_rows];

    // Group `group` of the block is group `column` of the rows.
    void add(const B& block, int group, int32_t column) {
        const GroupCodes<format> codes(block, group);
        const F32x16 scale = block.scale(group, 0);
        if constexpr (B::kHalves == 2) {
            add_part<0, 4>(codes, scale, column);
            add_part<4, 4>(codes, block.scale(group, 1), column);
        } else {
            add_part<0, 8>(codes, scale, column);
        }
        if constexpr (B::kHasMinimum) {
            const F32x16 minimum = block.minimum(group);
            for (int i = 0; i < num_rows; ++i) sums[i] = fma(minimum, F32x16::set1(rows[i].sums[column]), sums[i]);
        }
    }

    template <int first, int count> void add_part(const GroupCodes<format>& codes, F32x16 scale, int32_t column) {
        const F32x16 fine_scale = scale * F32x16::set1(1.0F / kFineSteps);
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE {
            const QuantisedRow& row = rows[i];
            const I32x16 products =
                codes.template sums<first, count>(row.codes + kGroup * column, row.code_sums + 2 * column);
            if (row.is_fine[column]) [[unlikely]] {  // the same groups for each panel, so that processors foresee it
                const I32x16 fine_products =
                    codes.template sums<first, count>(row.fine_codes + kGroup * column, row.fine_sums + 2 * column);
                const F32x16 both = fine_scale * F32x16::set1(row.scales[column]);
                sums[i] = fma(to_f32(shift_left<7>(products) + fine_products), both, sums[i]);
            } else {
                sums[i] = fma(to_f32(products), scale * F32x16::set1(row.scales[column]), sums[i]);
            }
        });
    }
};

// Stores leave in order, so each would wait for a line that is not near.
void ask_for_outputs(const Int8Rows& rows, int32_t panel, int32_t first_row, int32_t num_rows) {
    const float* out = rows.out + first_row * rows.out_stride + panel * kLanes;
    for (int32_t i = 0; i < num_rows; ++i) prefetch_to_write(out + i * rows.out_stride);
}

void write(const Int8Rows& rows, int32_t row, F32x16 sum, int32_t first_lane, int32_t num_lanes) {
    float* out = rows.out + row * rows.out_stride + first_lane;
    if (rows.bias != nullptr) sum = sum + load_first(rows.bias + first_lane, num_lanes);
    store_first(sum, out, num_lanes);
}

template <Format format, int num_rows>
void multiply_rows(const Part& part, const Int8Rows& rows, int32_t panel, int32_t first_row) {
    using B = Block<format>;
    ask_for_outputs(rows, panel, first_row, num_rows);
    QuantisedRow some[num_rows];
    for (int i = 0; i < num_rows; ++i) some[i] = rows.row(first_row + i);
    RowSums<format, num_rows> sums{some, {}};
    for (F32x16& sum : sums.sums) sum = F32x16::zero();
    const int64_t bytes = block_bytes(format, part.group_size), group_bytes = bytes / B::groups(part.group_size);
    const std::byte* block = part.data + panel * panel_bytes(format, part.group_size, rows.x.width);
    const int32_t num_groups = rows.x.width / kGroup, groups = B::groups(part.group_size);
    for (int32_t column = 0; column < num_groups; column += groups, block += bytes) {
        const B unpacked(block, part.group_size);
        for (int32_t group = 0; group < groups; ++group) {
            for (int64_t byte = 0; byte < group_bytes; byte += 64)
                prefetch_to_first_level(block + group * group_bytes + kBytesAhead + byte);
            sums.add(unpacked, group, column + group);
        }
    }
    const int32_t first_lane = panel * kLanes, left = part.num_rows - first_lane;
    for (int i = 0; i < num_rows; ++i)
        write(rows, first_row + i, sums.sums[i], first_lane, left < kLanes ? left : kLanes);
}

template <Format format, int num_rows>
int32_t multiply_blocks(const Part& part, const Int8Rows& rows, int32_t panel, int32_t first_row) {
    for (; first_row + num_rows <= rows.num_rows; first_row += num_rows)
        multiply_rows<format, num_rows>(part, rows, panel, first_row);
    return first_row;
}

}  // namespace

template <Format format> void multiply_panel(const Part& part, const Int8Rows& rows, int32_t panel) {
    int32_t row = multiply_blocks<format, kMostRows>(part, rows, panel, 0);
    if constexpr (kMostRows > 4) row = multiply_blocks<format, 4>(part, rows, panel, row);
    row = multiply_blocks<format, 2>(part, rows, panel, row);
    multiply_blocks<format, 1>(part, rows, panel, row);
}

void multiply_panels_by_rows(const Part& part, const Int8Rows& rows, int32_t first, int32_t last) {
    with_format(part.format, [&]<Format format>() {
        for (int32_t panel = first; panel < last; ++panel) multiply_panel<format>(part, rows, panel);
    });
}

}  // namespace kvarto::KVARTO_ISA
