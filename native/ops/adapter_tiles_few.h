// Products of adapters by tiles, where an item has few rows.
#pragma once

#if defined(__AMX_BF16__)

#include "ops/adapter_tiles.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kFewRows = 4;  // and fewer

inline bool are_few(RowRange range) { return range.last - range.first <= kFewRows; }

// Items of A and of B; where a worker's next one begins is asked for as the last of them is multiplied.
void shrink_few(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next, TileShapes& shapes);
void expand_few(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next);

}  // namespace kvarto::KVARTO_ISA

#endif
