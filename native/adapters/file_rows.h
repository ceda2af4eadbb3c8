// Reads one tensor of a file, checks its values and rearranges them; see pack_plan.h.
#pragma once

#include "adapters/pack_plan.h"

namespace kvarto {

// Read at a time: what was read is still in the second-level cache when it is checked and moved.
inline constexpr int64_t kBlockBytes = 256 << 10;

// `target` has room for all of the tensor. What it holds is not said where this does not end well.
PackPlan::Result read_tensor(int file, const FileTensor& tensor, std::byte* target);

}  // namespace kvarto
