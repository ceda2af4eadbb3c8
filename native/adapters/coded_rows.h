// Reads one tensor of a file whose values become codes; see file_rows.h.
#pragma once

#include <numeric>

#include "adapters/file_reader.h"
#include "adapters/pack_plan.h"

namespace kvarto {

// Of a tensor that is transposed, and what is read at a time of it: whole blocks of its columns.
inline constexpr int64_t kMostRowsBytes = 1 << 20;

// Rows of a tensor that is transposed which make whole blocks, and whole heads where those come apart.
inline int64_t rows_together(const FileTensor& tensor) {
    return tensor.num_heads == 0 ? kCodeColumns : std::lcm(int64_t{kCodeColumns}, tensor.num_rows / tensor.num_heads);
}

PackPlan::Result read_coded(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, std::byte* target);

}  // namespace kvarto
