// Loops over the values of adapters' files, which are aligned to nothing there; see native/adapters/pack_plan.h.
//
// What they write for pages goes past the caches, in whole lines: a page is too far away when it is complete, and an
// ordinary store would first read the line that it overwrites. Others see it after a fence.
#pragma once

#include "core/kernels.h"

namespace kvarto::KVARTO_ISA {

// Whether no value is NaN or infinite. `type` is one without codes.
bool are_finite(StripType type, const std::byte* values, int64_t count);
// The same, and copies them; `out` is aligned to a value.
bool copy_finite(StripType type, const std::byte* values, int64_t count, std::byte* out);
void transpose(const Transposition& block);

}  // namespace kvarto::KVARTO_ISA
