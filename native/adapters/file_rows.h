// Reads one tensor of a file, checks its values and rearranges them; see pack_plan.h.
#pragma once

#include "adapters/file_reader.h"
#include "adapters/pack_plan.h"

namespace kvarto {

// `target` has room for all of the tensor. What it holds is not said where this does not end well. `is_read_soon`:
// columns go through the caches, for somebody looks at them next.
PackPlan::Result read_tensor(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, std::byte* target,
                             bool is_read_soon);

}  // namespace kvarto
