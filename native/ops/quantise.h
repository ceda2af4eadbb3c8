// From float32 to the quantised form of an activation row (core/rows.h).
#pragma once

#include "core/rows.h"

namespace kvarto::KVARTO_ISA {

// Quantises x[0 .. width - 1], a row or a piece of it; width is a multiple of 32. The bits are the same on every set.
// A group that holds a NaN or an infinity gets zeros for codes and NaN for its scale and sum, so that products show
// it; one whose largest value is below 1e-26 is all zeros. A group has fine codes where the magnitudes of its codes
// are below 14 on average.
//
// Cost: about 30 vector operations and two loads per group of 32, on x in the first-level cache; 15 more where it has
// fine codes.
void quantise_row(const float* x, int32_t width, QuantisedRow out);

}  // namespace kvarto::KVARTO_ISA
