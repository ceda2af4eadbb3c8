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

constexpr int32_t kRowsTogether = 48;  // whose places are looked up once for all panels

// Where a group's numbers lie in any row, from the row's first byte.
struct GroupPlace {
    int64_t codes, fine_codes, scale, sum, code_sums, fine_sums, is_fine;

    GroupPlace(const QuantisedRow& row, int32_t group) {
        const auto* begin = reinterpret_cast<const std::byte*>(row.codes);
        const QuantisedRow at = row.from(kGroup * group);
        const auto place = [&](const auto* p) { return reinterpret_cast<const std::byte*>(p) - begin; };
        codes = place(at.codes), fine_codes = place(at.fine_codes), scale = place(at.scales), sum = place(at.sums);
        code_sums = place(at.code_sums), fine_sums = place(at.fine_sums), is_fine = place(at.is_fine);
    }
};

inline float load_float(const std::byte* p) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// Rows are known by their first bytes alone: with one place for all of them, both fit in registers.
template <Format format, int num_rows> struct RowSums {
    using B = Block<format>;
    const std::byte* rows[num_rows];
    F32x16 sums[num_rows];

    // Group `group` of the block.
    KVARTO_INLINE void add(const B& block, int group, const GroupPlace& place) {
        const GroupCodes<format> codes(block, group);
        const F32x16 scale = block.scale(group, 0);
        if constexpr (B::kHalves == 2) {
            add_part<0, 4>(codes, scale, place);
            add_part<4, 4>(codes, block.scale(group, 1), place);
        } else {
            add_part<0, 8>(codes, scale, place);
        }
        if constexpr (B::kHasMinimum) {
            const F32x16 minimum = block.minimum(group);
            unrolled<num_rows>([&]<int i>() KVARTO_INLINE {
                sums[i] = fma(minimum, F32x16::set1(load_float(rows[i] + place.sum)), sums[i]);
            });
        }
    }

    template <int first, int count>
    KVARTO_INLINE void add_part(const GroupCodes<format>& codes, F32x16 scale, const GroupPlace& place) {
        const auto products = [&](const std::byte* some_codes, const std::byte* their_sums) KVARTO_INLINE {
            return codes.template sums<first, count>(reinterpret_cast<const int8_t*>(some_codes),
                                                     reinterpret_cast<const int16_t*>(their_sums));
        };
        const F32x16 fine_scale = scale * F32x16::set1(1.0F / kFineSteps);
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE {
            const std::byte* row = rows[i];
            const I32x16 coarse = products(row + place.codes, row + place.code_sums);
            const F32x16 row_scale = F32x16::set1(load_float(row + place.scale));
            if (row[place.is_fine] != std::byte{0}) [[unlikely]] {  // the same groups for each panel: processors foresee it
                const I32x16 fine = products(row + place.fine_codes, row + place.fine_sums);
                sums[i] = fma(to_f32(shift_left<7>(coarse) + fine), fine_scale * row_scale, sums[i]);
            } else {
                sums[i] = fma(to_f32(coarse), scale * row_scale, sums[i]);
            }
        });
    }
};

// Panels of a part, one after the other, with rows that are looked up once.
template <Format format> class PanelsByRows {
public:
    using B = Block<format>;

    PanelsByRows(const Part& part, const Int8Rows& rows)
        : part_(part),
          rows_(rows),
          block_bytes_(block_bytes(format, part.group_size)),
          panel_bytes_(panel_bytes(format, part.group_size, rows.x.width)),
          groups_(B::groups(part.group_size)),
          num_groups_(rows.x.width / kGroup) {}

    void multiply(int32_t first, int32_t last) {
        for (first_row_ = 0; first_row_ < rows_.num_rows; first_row_ += kRowsTogether) {
            num_rows_ = std::min(kRowsTogether, rows_.num_rows - first_row_);
            for (int32_t i = 0; i < num_rows_; ++i)
                places_[i] = reinterpret_cast<const std::byte*>(rows_.row(first_row_ + i).codes);
            for (int32_t panel = first; panel < last; ++panel) multiply_panel(panel);
        }
    }

private:
    void multiply_panel(int32_t panel) const {
        int32_t row = multiply_blocks<kMostRows>(panel, 0);
        if constexpr (kMostRows > 4) row = multiply_blocks<4>(panel, row);
        row = multiply_blocks<2>(panel, row);
        multiply_blocks<1>(panel, row);
    }

    template <int num_rows> int32_t multiply_blocks(int32_t panel, int32_t row) const {
        for (; row + num_rows <= num_rows_; row += num_rows) multiply_rows<num_rows>(panel, row);
        return row;
    }

    template <int num_rows> void multiply_rows(int32_t panel, int32_t first) const {
        // Stores leave in order, so each would wait for a line that is not near.
        float* out = rows_.out + (first_row_ + first) * rows_.out_stride + panel * kLanes;
        for (int i = 0; i < num_rows; ++i) prefetch_to_write(out + i * rows_.out_stride);
        RowSums<format, num_rows> sums;
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE { sums.rows[i] = places_[first + i], sums.sums[i] = F32x16::zero(); });
        const QuantisedRow row = rows_.row(first_row_ + first);
        const int64_t group_bytes = block_bytes_ / groups_;
        const std::byte* block = part_.data + panel * panel_bytes_;
        for (int32_t column = 0; column < num_groups_; column += groups_, block += block_bytes_) {
            const B unpacked(block, part_.group_size);
            for (int32_t group = 0; group < groups_; ++group) {
                for (int64_t byte = 0; byte < group_bytes; byte += 64)
                    prefetch_to_first_level(block + group * group_bytes + kBytesAhead + byte);
                sums.add(unpacked, group, GroupPlace(row, column + group));
            }
        }
        const int32_t left = part_.num_rows - panel * kLanes, num_lanes = left < kLanes ? left : kLanes;
        unrolled<num_rows>([&]<int i>() KVARTO_INLINE {
            write(sums.sums[i], out + i * rows_.out_stride, panel, num_lanes);
        });
    }

    KVARTO_INLINE void write(F32x16 sum, float* out, int32_t panel, int32_t num_lanes) const {
        if (rows_.bias != nullptr) sum = sum + load_first(rows_.bias + panel * kLanes, num_lanes);
        store_first(sum, out, num_lanes);
    }

    const Part& part_;
    const Int8Rows& rows_;
    const int64_t block_bytes_, panel_bytes_;
    const int32_t groups_, num_groups_;
    int32_t first_row_ = 0, num_rows_ = 0;
    const std::byte* places_[kRowsTogether];
};

}  // namespace

void multiply_panels_by_rows(const Part& part, const Int8Rows& rows, int32_t first, int32_t last) {
    with_format(part.format, [&]<Format format>() { PanelsByRows<format>(part, rows).multiply(first, last); });
}

}  // namespace kvarto::KVARTO_ISA
