// What adapter_product.h computes, where rows and strips are bfloat16, or codes, which stand for such numbers, and the
// machine has matrix tiles. Sums have the order of tile products (see linear_bf16.h), whatever the rows beside it and the
// thread:
//
//   t     by groups of 32 columns of x and A
//   acc   t rounded to bfloat16, to nearest even; by groups of 32 ranks. What there is not counts as zero
//   y     as in adapter_product.h
#pragma once

#if defined(__AMX_BF16__)

#include "core/adapters.h"
#include "ops/adapter_items.h"
#include "ops/adapter_span.h"
#include "simd/tiles.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kTileStrips = 16;    // strips of A that are multiplied together
inline constexpr int32_t kTileItemRows = 64;  // rows of an item
inline constexpr int32_t kMaxTileRank = 256;  // what room on the stack is for; larger ranks are not multiplied so

// Whether an update is multiplied so: it depends on what it is, and on no rows.
inline bool uses_tiles(const AdapterWork& work, const AdapterUpdate& update) {
    return work.token_ids == nullptr && work.x.form == RowForm::kBF16 && stands_for_bf16(update.a.type) &&
           stands_for_bf16(update.b.type) && update.b.num_columns % kGroup == 0 && update.rank() <= kMaxTileRank;
}

// What tile registers look like, which is set where it changes. Gives their state up at the end.
class TileShapes {
public:
    TileShapes() = default;
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;
    ~TileShapes() {
        if (strips_ >= 0) release_tiles();
    }
    // Tiles 0 to 3: a sum per strip; 4: the strips; 5 to 7: a row.
    void set_few(int32_t num_strips) {
        if (strips_ == num_strips) return;
        strips_ = num_strips;
        TileConfig config;
        for (int tile = 0; tile < 4; ++tile) config.set(tile, num_strips, 4);
        config.set(4, num_strips, 64);
        for (int tile = 5; tile < 8; ++tile) config.set(tile, 16, 4);
        configure_tiles(config);
    }
    void set_whole() {
        if (strips_ == 0) return;
        strips_ = 0;
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
        configure_tiles(config);
    }

private:
    int32_t strips_ = -1;  // 0: all tiles are whole
};

// Items of A and of B; a worker's next one is asked for in between.
void shrink_by_tiles(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next, TileShapes& shapes);
void expand_by_tiles(const AdapterWork& work, const UpdateItem& item, const UpdateItem& next, TileShapes& shapes);

}  // namespace kvarto::KVARTO_ISA

#endif
