#include "weights/repack.h"

#include <vector>

#include "weights/file_blocks.h"

namespace kvarto {

int64_t file_block_bytes(Format format, int32_t group_size) {
    switch (format) {
        case Format::kF32:
        case Format::kF16:
        case Format::kBF16: return 4;
        case Format::kQ8_0: return 34;
        case Format::kQ4_0: return 18;
        case Format::kQ4_1: return 20;
        case Format::kQ5_0: return 22;
        case Format::kQ5_1: return 24;
        case Format::kQ4_K: return 144;
        case Format::kQ5_K: return 176;
        case Format::kQ6_K: return 210;
        case Format::kInt4: return 3 + group_size / 2;
    }
    return 0;
}

int64_t file_row_bytes(const RowShape& shape) {
    if (shape.format == Format::kF16 || shape.format == Format::kBF16) return 2 * int64_t{shape.num_columns};
    const int32_t columns = block_columns(shape.format, shape.group_size);
    return shape.num_columns / columns * file_block_bytes(shape.format, shape.group_size);
}

namespace {

// 32 codes of four bits are 16 bytes on file: low nibbles are k = 0..15, high ones k = 16..31. That is a `nib` quad per
// four bytes, so they move as words.
void pack_nibbles(const BlockRows& rows, int64_t offset, std::byte* out) { interleave<uint32_t>(rows, offset, 4, out); }

void pack_q8_0(const BlockRows& rows, std::byte* out) {
    interleave<uint16_t>(rows, 0, 1, out);
    interleave<uint32_t>(rows, 2, 8, out + 32);
}

void pack_q4_0(const BlockRows& rows, std::byte* out) {
    interleave<uint16_t>(rows, 0, 1, out);
    pack_nibbles(rows, 2, out + 32);
}

void pack_q4_1(const BlockRows& rows, std::byte* out) {
    interleave<uint16_t>(rows, 0, 2, out);
    pack_nibbles(rows, 4, out + 64);
}

void pack_q5_0(const BlockRows& rows, std::byte* out) {
    interleave<uint16_t>(rows, 0, 1, out);
    interleave<uint32_t>(rows, 2, 1, out + 32);
    pack_nibbles(rows, 6, out + 96);
}

void pack_q5_1(const BlockRows& rows, std::byte* out) {
    interleave<uint16_t>(rows, 0, 2, out);
    interleave<uint32_t>(rows, 4, 1, out + 64);
    pack_nibbles(rows, 8, out + 128);
}

void pack_int4(const BlockRows& rows, int32_t group_size, std::byte* out) {
    interleave<uint16_t>(rows, 0, 1, out);
    interleave<uint8_t>(rows, 2, 1, out + 32);
    for (int32_t i = 0; i < group_size / 32; ++i) pack_nibbles(rows, 3 + 16 * i, out + 48 + 256 * i);
}

void pack_block(const RowShape& shape, const BlockRows& rows, std::byte* out) {
    switch (shape.format) {
        case Format::kF32:
        case Format::kF16:
        case Format::kBF16: return;  // pack_floats
        case Format::kQ8_0: return pack_q8_0(rows, out);
        case Format::kQ4_0: return pack_q4_0(rows, out);
        case Format::kQ4_1: return pack_q4_1(rows, out);
        case Format::kQ5_0: return pack_q5_0(rows, out);
        case Format::kQ5_1: return pack_q5_1(rows, out);
        case Format::kQ4_K: return pack_q4_k(rows, out);
        case Format::kQ5_K: return pack_q5_k(rows, out);
        case Format::kQ6_K: return pack_q6_k(rows, out);
        case Format::kInt4: return pack_int4(rows, shape.group_size, out);
    }
}

// Words of one f32 or two halves; an odd last half has a zero beside it.
void pack_floats(const RowShape& shape, const BlockRows& rows, std::byte* panel) {
    const int32_t columns = block_columns(shape.format, 0), num_words = shape.num_columns / columns;
    interleave<uint32_t>(rows, 0, num_words, panel);
    if (shape.num_columns % columns == 0) return;
    std::byte* last = panel + int64_t{num_words} * 4 * kLanes;
    for (int32_t lane = 0; lane < kLanes; ++lane)
        store(last + 4 * lane, uint32_t{load<uint16_t>(rows[lane] + int64_t{4} * num_words)});
}

void pack_panel(const RowShape& shape, BlockRows rows, std::byte* panel) {
    if (!is_quantised(shape.format)) return pack_floats(shape, rows, panel);
    const int64_t columns = block_columns(shape.format, shape.group_size);
    const int64_t bytes = block_bytes(shape.format, shape.group_size);
    const int64_t file_bytes = file_block_bytes(shape.format, shape.group_size);
    for (int64_t block = 0; block < shape.num_columns / columns; ++block) {
        pack_block(shape, rows, panel);
        panel += bytes;
        for (const std::byte*& row : rows) row += file_bytes;
    }
}

}  // namespace

void repack_rows(const RowShape& shape, const std::byte* rows, int64_t num_rows, std::byte* panels) {
    const int64_t row_bytes = file_row_bytes(shape);
    const int64_t bytes = panel_bytes(shape.format, shape.group_size, shape.num_columns);
    const std::vector<std::byte> absent(num_rows % kLanes == 0 ? 0 : row_bytes);
    for (int64_t first = 0; first < num_rows; first += kLanes) {
        BlockRows lanes;
        for (int32_t lane = 0; lane < kLanes; ++lane)
            lanes[lane] = first + lane < num_rows ? rows + (first + lane) * row_bytes : absent.data();
        pack_panel(shape, lanes, panels + first / kLanes * bytes);
    }
}

}  // namespace kvarto
