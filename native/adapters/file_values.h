// Values of a file, which are aligned to nothing, in float32; what else is done with them: ops/pack_values.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adapters/file_reader.h"
#include "adapters/pack_plan.h"

namespace kvarto {

// Why there were no bytes.
PackPlan::Result ended(const FileReader::Bytes& bytes);
// In float32; float16 must be finite.
void widen(FileType type, const std::byte* values, int64_t count, float* out);

}  // namespace kvarto
