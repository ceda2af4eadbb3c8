// Reads one tensor of a file, checks its values and rearranges them; see pack_plan.h.
#pragma once

#include "adapters/file_reader.h"
#include "adapters/pack_plan.h"

namespace kvarto {

// `target` has room for all of the tensor. What it holds is not said where this does not end well.
PackPlan::Result read_tensor(FileReader& file, const FileTensor& tensor, const PackKernels& kernels, std::byte* target);

}  // namespace kvarto
