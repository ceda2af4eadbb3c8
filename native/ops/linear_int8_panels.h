// The two ways of `multiply_panels`; both give the same bits.
#pragma once

#include "ops/lanes.h"
#include "ops/linear_int8.h"

namespace kvarto::KVARTO_ISA {

// With vector instructions, straight from the rows; for few rows, and on sets without tiles for any number.
void multiply_panels_by_rows(const Part& part, const Int8Rows& rows, int32_t first, int32_t last);

// In tiles of sixteen staged rows. Only where `kHasTiles`.
void multiply_panels_by_tiles(const Part& part, const Int8Rows& rows, int32_t first, int32_t last);

#if defined(__AVX512VNNI__)
inline constexpr bool kHasTiles = true;
#else
inline constexpr bool kHasTiles = false;
#endif

// As tiles multiply them; fewer are multiplied as they lie: a tile would be partly empty, or to stage rows and to unpack
// first would cost more than it saves. Codes of 8 bits need no unpacking.
inline constexpr int32_t kFewestInt8TileRowsOf8Bits = 16;
#if defined(__AMX_INT8__)
inline constexpr int32_t kFewestInt8TileRows = 16;
#else
inline constexpr int32_t kFewestInt8TileRows = 48;
#endif

}  // namespace kvarto::KVARTO_ISA
