// Where the 64 keys and values of a tile lie.
#pragma once

#include "ops/attention_plan.h"
#include "ops/kv_page.h"
#include "ops/prefetch.h"

namespace kvarto::KVARTO_ISA {

// A tile of one head of a sequence.
struct TilePlace {
    const int32_t* table = nullptr;
    int32_t context = 0, head = 0, tile = 0;

    bool operator==(const TilePlace&) const = default;
};

// One plane of one head. Null where there is no key: behind the context's end, or where no page is kept.
struct TileTokens {
    const std::byte* token[kTileKeys];
    const float* scale[kTileKeys];  // of int8 only
    bool is_whole = true;           // all 64 are there
    int32_t end_key = 0;            // behind the last that is there

    TileTokens(const LayerPages& pages, const int32_t* table, int32_t context, int32_t tile, int32_t head,
               Plane which) {
        const int32_t first = tile * kTileKeys, end = std::min(first + kTileKeys, context);
        const int32_t* next_page = table + first / pages.page_size;
        int32_t key = first, offset = first % pages.page_size;
        while (key < end) {
            const int32_t run = std::min(pages.page_size - offset, end - key), page = *next_page++;
            if (page >= 0)
                add_run(pages, pages.plane(page, head, which), offset, key - first, run);
            else
                leave_out(key - first, run);
            key += run, offset = 0;
        }
        end_key = key - first;
        if (key < first + kTileKeys) leave_out(key - first, first + kTileKeys - key);
    }

    // Without gaps, and all there.
    bool are_together(int32_t first, int32_t count, int64_t token_bytes) const {
        const std::byte* last = token[first + count - 1];
        return token[first] != nullptr && last != nullptr && last - token[first] == (count - 1) * token_bytes;
    }

private:
    void leave_out(int32_t first, int32_t run) {
        std::fill_n(token + first, run, nullptr);
        is_whole = false;
    }
    void add_run(const LayerPages& pages, const HeadPlane& plane, int32_t offset, int32_t first, int32_t run) {
        for (int32_t i = 0; i < run; ++i) token[first + i] = plane.token(offset + i, pages.token_bytes);
        if (plane.scales == nullptr) return;
        for (int32_t i = 0; i < run; ++i) scale[first + i] = plane.scales + offset + i;
    }
};

struct KVTile {
    TileTokens keys, values;

    KVTile(const LayerPages& pages, const TilePlace& place)
        : keys(pages, place.table, place.context, place.tile, place.head, Plane::kKey),
          values(pages, place.table, place.context, place.tile, place.head, Plane::kValue) {}
};

// Asks for the tokens of a tile one by one, keys first.
class Ahead {
public:
    Ahead() = default;
    Ahead(const KVTile& tile, int64_t token_bytes) : tile_(&tile), token_bytes_(token_bytes), left_(2 * kTileKeys) {}

    [[gnu::always_inline]] void ask() {  // a call would put all sums aside
        if (left_ == 0) return;
        const int32_t index = 2 * kTileKeys - left_--;
        const std::byte* token = index < kTileKeys ? tile_->keys.token[index] : tile_->values.token[index - kTileKeys];
        if (token == nullptr) return;
        for (int64_t byte = 0; byte < token_bytes_; byte += 64) prefetch_to_second_level(token + byte);
    }

private:
    const KVTile* tile_ = nullptr;
    int64_t token_bytes_ = 0;
    int32_t left_ = 0;
};

// Elements [first, first + 16) of a token as float32; 0 behind the head's end, and where there is no key.
template <KVType kType>
inline F32x16 load_token(const TileTokens& tokens, int32_t key, int32_t first, int32_t head_dim) {
    const std::byte* token = tokens.token[key];
    if (token == nullptr) return F32x16::zero();
    const std::byte* p = token + first * element_bytes(kType);
    const F32x16 x = first + 16 <= head_dim ? load_elements<kType>(p) : load_last_elements<kType>(p, head_dim - first);
    if constexpr (kType == KVType::kInt8) return x * F32x16::set1(*tokens.scale[key]);
    return x;
}

}  // namespace kvarto::KVARTO_ISA
