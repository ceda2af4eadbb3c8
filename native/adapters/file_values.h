// Values of a file, which are aligned to nothing: looked at, copied, widened.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adapters/file_reader.h"
#include "adapters/pack_plan.h"

namespace kvarto {

// Why there were no bytes.
PackPlan::Result ended(const FileReader::Bytes& bytes);
// Whether no value is NaN or infinite; of kQ8_0, of values that were widened.
bool are_finite(FileType type, const std::byte* values, int64_t count);
// The same, and copies them.
bool copy_finite(FileType type, const std::byte* values, int64_t count, std::byte* out);
// In float32; float16 must be finite.
void widen(FileType type, const std::byte* values, int64_t count, float* out);

}  // namespace kvarto
