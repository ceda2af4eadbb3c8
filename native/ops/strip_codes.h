// Blocks of codes from float32 values: what kvarto/adapters/strip_codes.py says, byte for byte.
#pragma once

#include "core/kernels.h"

namespace kvarto::KVARTO_ISA {

// `num_blocks` blocks of kCodeColumns values each, one after the other; all are finite. False where a scale is beyond
// float16; what was written is then not said.
bool encode(StripType type, const float* values, int64_t num_blocks, std::byte* out);

}  // namespace kvarto::KVARTO_ISA
