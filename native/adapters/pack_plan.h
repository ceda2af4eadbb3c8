// One pass over an adapter's file: each value is checked once and put where the adapter's stream has it, or its code.
//
//     file:   | header | tensor | tensor | ...        rows as they lie there, in any order
//     stream: | A0: rows | B0: columns | ... | 0 0 |  as pages have it (kvarto/adapters/packing.py)
//     beside: | values that the stream does not have as they are |
//
// A plan says where each tensor goes; it is made once for all adapters of one shape. Knows no names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adapters/paged_stream.h"
#include "core/kernels.h"
#include "core/strip_type.h"

namespace kvarto {

enum class FileType : uint8_t { kF32, kF16, kBF16, kQ8_0 };  // the last becomes float32

struct FileTensor {
    int64_t offset;       // of its first byte, in the file
    int64_t num_rows;     // as they lie in the file
    int64_t num_columns;
    int64_t start;        // of its first byte, in the stream or beside it
    FileType type;
    StripType strips;     // what it becomes: what it is once it was read, or codes
    bool is_transposed;   // its columns follow each other there
    bool is_beside;
    int64_t num_heads;    // not 0: a head's two halves lie row by row in turns, and come apart

    StripType value_type() const {  // once it was read
        if (type == FileType::kF16) return StripType::kF16;
        return type == FileType::kBF16 ? StripType::kBF16 : StripType::kF32;
    }
    int64_t item_bytes() const { return block_bytes(value_type()); }
    int64_t row_bytes() const { return num_columns * item_bytes(); }
    int64_t strip_columns() const { return is_transposed ? num_rows : num_columns; }
    int64_t size_bytes() const { return num_rows * num_columns / strip_columns() * strip_bytes(strips, strip_columns()); }
    int64_t file_row_bytes() const { return type == FileType::kQ8_0 ? num_columns / 32 * 34 : row_bytes(); }
    int64_t file_bytes() const { return num_rows * file_row_bytes(); }
    bool is_rearranged() const { return is_transposed || num_heads != 0; }
    bool stays_as_it_lies() const { return !has_codes(strips) && !is_rearranged() && type != FileType::kQ8_0; }
    // Where a row of the file lies among those wanted.
    int64_t place_of(int64_t row) const;
};

class FileReader;

class PackPlan {
public:
    enum class End { kDone, kNotFinite, kTooLarge, kFileEnded, kFailed };  // too large for a code
    struct Result {
        End end = End::kDone;
        int64_t tensor = 0;  // the one at which it ended
        int error = 0;       // errno, where reading failed
        int64_t num_direct_bytes = 0;  // that were read past the page cache
    };

    // Throws std::invalid_argument where a tensor leaves the file or its target, or meets another there.
    PackPlan(std::vector<FileTensor> tensors, int64_t file_bytes, int64_t stream_bytes, int64_t beside_bytes);

    // Reads the file through a descriptor, whose position stays. Bytes of the stream that no tensor has are zero, to
    // the end of `stream`, which may be longer; they are written fastest where its pages begin with a cache line.
    // `may_be_direct`: see FileReader. Safe from several threads. Throws std::invalid_argument for targets that are too
    // short or lie at no multiple of 4 bytes.
    Result pack(const PackKernels& kernels, int file, const PagedStream& stream, std::span<std::byte> beside,
                bool may_be_direct) const;

private:
    struct Gap {
        int64_t start, end;
    };
    static Result read(FileReader& reader, const FileTensor& tensor, const PackKernels& kernels, const PagedStream& stream);
    // What no tensor fills of a target.
    std::vector<Gap> gaps(bool is_beside, int64_t size_bytes) const;

    std::vector<FileTensor> tensors_;
    std::vector<size_t> order_;  // as they follow each other in the file
    int64_t end_ = 0;            // of the last one there
    int64_t stream_bytes_, beside_bytes_;
    std::vector<Gap> stream_gaps_, beside_gaps_;
};

}  // namespace kvarto
