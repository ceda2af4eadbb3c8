#include "weights/format.h"

namespace kvarto {

int32_t block_columns(Format format, int32_t group_size) {
    switch (format) {
        case Format::kF32: return 1;
        case Format::kF16:
        case Format::kBF16: return 2;
        case Format::kQ8_0:
        case Format::kQ4_0:
        case Format::kQ4_1:
        case Format::kQ5_0:
        case Format::kQ5_1: return 32;
        case Format::kQ4_K:
        case Format::kQ5_K:
        case Format::kQ6_K: return 256;
        case Format::kInt4: return group_size;
    }
    return 0;
}

int64_t block_bytes(Format format, int32_t group_size) {
    switch (format) {
        case Format::kF32:
        case Format::kF16:
        case Format::kBF16: return 64;
        case Format::kQ8_0: return 544;
        case Format::kQ4_0: return 288;
        case Format::kQ4_1: return 320;
        case Format::kQ5_0: return 352;
        case Format::kQ5_1: return 384;
        case Format::kQ4_K: return 2304;
        case Format::kQ5_K: return 2816;
        case Format::kQ6_K: return 3360;
        case Format::kInt4: return 48 + 8 * int64_t{group_size};
    }
    return 0;
}

int64_t panel_bytes(Format format, int32_t group_size, int32_t num_columns) {
    const int32_t columns = block_columns(format, group_size);
    return (int64_t{num_columns} + columns - 1) / columns * block_bytes(format, group_size);
}

int64_t part_bytes(Format format, int32_t group_size, int32_t num_rows, int32_t num_columns) {
    const int64_t num_panels = (int64_t{num_rows} + kLanes - 1) / kLanes;
    return align_up(num_panels * panel_bytes(format, group_size, num_columns), 64);
}

bool is_quantised(Format format) {
    return format != Format::kF32 && format != Format::kF16 && format != Format::kBF16;
}

}  // namespace kvarto
