// From rows as model files keep them to panels (format.h), and back. Content stays exact: bits are moved, never rounded.
//
// A file's row is a run of blocks along the columns:
//
//   F32, F16, BF16   values
//   Q…               ggml's blocks of 32 or 256, as GGUF has them
//   INT4             per group: d f16 | zero u8 | codes of 32 k in 16 bytes each: code i | code (i + 16) << 4
#pragma once

#include <cstddef>
#include <cstdint>

#include "weights/format.h"

namespace kvarto {

struct RowShape {
    Format format = Format::kF32;
    int32_t group_size = 0;   // of kInt4; 0 elsewhere
    int32_t num_columns = 0;  // a multiple of the block's columns, but for F16 and BF16
};

// Bytes of one row as files keep it.
int64_t file_row_bytes(const RowShape& shape);

// Writes ceil(num_rows / 16) panels; lanes without a row are zeros. Rows lie back to back. Only moves bytes: about one
// load and one store per four of them, so memory bounds it on large matrices.
void repack_rows(const RowShape& shape, const std::byte* rows, int64_t num_rows, std::byte* panels);

// Rows [first, last) of the panels as float32, [last - first, num_columns]; bits as ggml's reference dequantises them.
void unpack_rows(const RowShape& shape, const std::byte* panels, int64_t first, int64_t last, float* out);

}  // namespace kvarto
