// What adapter_product.h computes, where rows and strips are bfloat16 and the machine has matrix tiles. Sums have the
// order of tile products (see linear_bf16.h), whatever the rows beside it and the thread:
//
//   t     by groups of 32 columns of x and A
//   acc   t rounded to bfloat16, to nearest even; by groups of 32 ranks. What there is not counts as zero
//   y     as in adapter_product.h
#pragma once

#if defined(__AMX_BF16__)

#include "core/adapters.h"
#include "ops/adapter_items.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kTileStrips = 16;    // strips of A that are multiplied together
inline constexpr int32_t kTileItemRows = 64;  // rows of an item
inline constexpr int32_t kMaxTileRank = 256;  // what room on the stack is for; larger ranks are not multiplied so

// Whether an update is multiplied so: it depends on what it is, and on no rows.
inline bool uses_tiles(const AdapterWork& work, const AdapterUpdate& update) {
    return work.token_ids == nullptr && work.x.form == RowForm::kBF16 && update.a.type == StripType::kBF16 &&
           update.b.type == StripType::kBF16 && update.b.num_columns % kGroup == 0 && update.rank() <= kMaxTileRank;
}

// Items of A and of B; a worker's next one is asked for in between.
void shrink_by_tiles(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next);
void expand_by_tiles(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next);

}  // namespace kvarto::KVARTO_ISA

#endif
