// Attention in vectors over pages of any type: tiles of 64 keys, whose sums add up in order inside spans of 1,024. In
// float32, or in pairs of bfloat16: `Numbers` is ExactNumbers or PairNumbers, which say what an item of four bytes is.
//
// A tile is laid out once for all rows of a unit: values [item of keys][dim], keys turned over, [item of dims][key], for
// few rows, and as they lie, in their pages where that will do, for rows that go by sixteen (attention_lanes.h). Scores
// and weighted sums are small products, C += A B: each element one chain over ascending dims or keys, the same in both
// ways. A key that a row does not see has weight 0, which changes nothing.
//
// Cost: 2 * 64 * dim multiply-adds per row and tile, bound by their rate; for few rows 64 shuffles per 256 items to
// turn the keys over, about what it takes to read them from memory. So the next tile is asked for all along, a token at a
// time: asked for at once, lines are more than the machine keeps track of, and memory stands idle afterwards.
#pragma once

#include <limits>
#include <optional>
#include <utility>

#include "ops/attention_lanes.h"
#include "ops/lanes.h"

namespace kvarto::KVARTO_ISA {

// Fewer rows than this are cheaper one by one than as a block of sixteen.
inline constexpr int32_t kFewestLaneRows = 10;

template <class Numbers> class VectorPath {
public:
    static constexpr int32_t kSpanTiles = 16;
    static constexpr int32_t kShareTiles = 1;
    static constexpr bool kAddsUp = true;  // to sums that are 0 at first
    using Factor = typename Numbers::Factor;

    VectorPath(const AttentionOp& op, Memory memory)
        : op_(op),
          pages_(op.pages, op.layer_slot, op.heads),
          dim_(op.heads.head_dim),
          num_items_(Numbers::num_items(dim_)),
          width_(Numbers::num_columns(dim_)),
          sums_width_(padded_dim(op.heads)),
          queries_(memory.take<float>(kUnitRows * num_items_)),
          keys_(memory.take<float>(num_items_ * kTileKeys)),
          turned_keys_(memory.take<float>(num_items_ * kTileKeys)),
          values_(memory.take<float>(kTileKeys / kTogether * width_)),
          scores_(memory.take<float>(kBlockRows * kTileKeys)),
          lanes_(op, memory) {}

    // What comes after the tiles that are attended to next.
    void ask_for(const int32_t* table, int32_t context, int32_t first_tile, int32_t end_tile, int32_t kv_head, int32_t) {
        if (first_tile < end_tile) coming_ = {table, context, kv_head, first_tile};
    }

    // Rows that will attend to tiles before `end_tile`.
    void start(const UnitRows& rows, int32_t) {
        const float scale = op_.softcap > 0 ? op_.scale : op_.scale * Numbers::kScoreUnit;
        alignas(64) float scaled[kMaxHeadDim];
        for (int32_t r = 0; r < rows.num_rows; ++r) {
            const float* head = op_.qkv.f32(rows.token[r]) + rows.head[r] * dim_;
            each_vector(dim_, [&](int32_t i, int32_t n) {
                (load_first(head + i, n) * F32x16::set1(scale)).store(scaled + i);
            });
            Numbers::pack(scaled, dim_, queries_ + r * num_items_);
        }
        if (rows.num_rows >= kFewestLaneRows) lanes_.start(queries_, rows.num_rows);
    }

    // Adds the tiles [first_tile, end_tile) of a sequence's pages to the sums of rows [first_row, end_row).
    void attend(const UnitRows& rows, int32_t first_row, int32_t end_row, const int32_t* table, int32_t context,
                int32_t kv_head, int32_t first_tile, int32_t end_tile, Sums& sums) {
        if (first_tile >= end_tile) return;
        const int32_t first_single = first_row + num_in_lanes(first_row, end_row);
        const KVTile* here = &tile_at({table, context, kv_head, first_tile});
        for (int32_t tile = first_tile; tile < end_tile; ++tile) {
            const bool is_last = tile + 1 == end_tile;
            const TilePlace next_place = is_last ? std::exchange(coming_, {}) : TilePlace{table, context, kv_head, tile + 1};
            const KVTile* next = next_place.table != nullptr ? &tile_at(next_place) : nullptr;
            ahead_ = next != nullptr ? Ahead(*next, pages_.token_bytes) : Ahead();
            lay_out(*here, first_row < first_single, first_single < end_row);
            for (int32_t r = first_row, num = 0; r < first_single; r += num) {
                num = lane_rows_together(first_single - r);
                lanes_.add_tile(rows, r, num, tile * kTileKeys, lane_keys_, values_, width_, sums, ahead_);
            }
            for (int32_t r = first_single; r < end_row; r += kBlockRows)
                add_tile(rows, r, std::min(kBlockRows, end_row - r), tile * kTileKeys, sums);
            here = next;
        }
    }

    // Values of a row, in the order of dims.
    const float* in_order(const float* values, float* out) const { return Numbers::in_order(values, dim_, out); }

private:
    static constexpr int32_t kTogether = Numbers::kTogether;

    // Kept until the one after the next.
    const KVTile& tile_at(const TilePlace& place) {
        if (place == last_place_) return *tiles_[last_];
        last_place_ = place, last_ = 1 - last_;
        return tiles_[last_].emplace(pages_, place);
    }

    // How many of the rows go by sixteen. Blocks of those begin where the unit's do.
    static int32_t num_in_lanes(int32_t first_row, int32_t end_row) {
        if (first_row % kLaneRows != 0) return 0;
        const int32_t num_rows = end_row - first_row, left = num_rows % kLaneRows;
        return left < kFewestLaneRows ? num_rows - left : num_rows;
    }

    void lay_out(const KVTile& tile, bool as_they_lie, bool turned) {
        switch (pages_.type) {
            case KVType::kF32: return lay_out_as<KVType::kF32>(tile, as_they_lie, turned);
            case KVType::kF16: return lay_out_as<KVType::kF16>(tile, as_they_lie, turned);
            case KVType::kBF16: return lay_out_as<KVType::kBF16>(tile, as_they_lie, turned);
            case KVType::kInt8: return lay_out_as<KVType::kInt8>(tile, as_they_lie, turned);
        }
    }

    template <KVType kType> void lay_out_as(const KVTile& tile, bool as_they_lie, bool turned) {
        if (as_they_lie) find_keys<kType>(tile);
        if (turned) turn_keys<kType>(tile);
        lay_out_values<kType>(tile);
    }

    // Those that follow each other as items already stay where they are.
    template <KVType kType> void find_keys(const KVTile& tile) {
        const bool are_items = kType == Numbers::kItemType && dim_ == num_items_ * kTogether;
        for (int32_t key = 0; key < kTileKeys; key += 16) {
            const bool stay = are_items && tile.keys.are_together(key, 16, pages_.token_bytes);
            if (!stay) copy_keys<kType>(tile, key);
            lane_keys_.sixteen[key / 16] =
                stay ? reinterpret_cast<const float*>(tile.keys.token[key]) : keys_ + key * num_items_;
        }
    }

    template <KVType kType> void copy_keys(const KVTile& tile, int32_t first) {
        for (int32_t key = first; key < first + 16; ++key)
            for (int32_t i = 0; i < num_items_; i += 16)
                Numbers::template load<kType>(tile.keys, key, i * kTogether, dim_).store(keys_ + key * num_items_ + i);
    }

    template <KVType kType> void turn_keys(const KVTile& tile) {
        const int32_t num_asks = 8 * kTileKeys / std::max(tile.keys.end_key, 16);
        for (int32_t key = 0; key < tile.keys.end_key; key += 16) {
            for (int32_t j = 0; j < num_asks; ++j) ahead_.ask();
            for (int32_t i = 0; i < num_items_; i += 16) {
                F32x16 block[16];
                for (int j = 0; j < 16; ++j)
                    block[j] = Numbers::template load<kType>(tile.keys, key + j, i * kTogether, dim_);
                transpose16(block);
                for (int j = 0; j < 16; ++j) block[j].store(turned_keys_ + (i + j) * kTileKeys + key);
            }
        }
    }

    template <KVType kType> void lay_out_values(const KVTile& tile) {
        constexpr int32_t kDims = 16 * kTogether;  // of a vector of items
        const int32_t num_asks = kTileKeys / std::max(tile.values.end_key, 1);
        for (int32_t key = 0; key < tile.values.end_key; key += kTogether) {
            for (int32_t j = 0; j < num_asks; ++j) ahead_.ask();
            float* out = values_ + key / kTogether * width_;
            for (int32_t i = 0; i < width_; i += kDims)
                Numbers::template lay_out_values<kType>(tile.values, key, i, dim_, out + i);
        }
    }

    void add_tile(const UnitRows& rows, int32_t row, int32_t num_rows, int32_t first_key, Sums& sums) {
        int32_t begin = kTileKeys, end = 0;  // what any of the rows sees of the tile
        for (int32_t r = row; r < row + num_rows; ++r) {
            begin = std::min(begin, rows.first_key[r] - first_key);
            end = std::max(end, rows.end_key[r] - first_key);
        }
        begin = std::max(begin, 0), end = std::min(end, kTileKeys);
        if (begin >= end) return;
        std::fill_n(scores_, num_rows * kTileKeys, 0.0F);
        const int32_t first = begin / 16 * 16, num_vectors = (end - first + 15) / 16;
        multiply<Numbers>(RowItems{queries_ + row * num_items_, num_items_}, turned_keys_ + first, kTileKeys, 0,
                          Numbers::num_used_items(dim_), Products{scores_ + first, kTileKeys}, num_rows, num_vectors,
                          ahead_);
        for (int32_t r = 0; r < num_rows; ++r)
            weigh(scores_ + r * kTileKeys, rows.first_key[row + r] - first_key, rows.end_key[row + r] - first_key,
                  row + r, sums);
        multiply<Numbers>(RowItems{scores_, kTileKeys}, values_, width_, begin / kTogether,
                          (end + kTogether - 1) / kTogether,
                          Products{sums.values + row * sums_width_, sums_width_}, num_rows, width_ / 16, ahead_);
    }

    // Turns a row's scores into weights, and scales what the row has so far to the new maximum.
    void weigh(float* scores, int32_t first_seen, int32_t end_seen, int32_t row, Sums& sums) const {
        constexpr float kUnseen = -std::numeric_limits<float>::infinity();
        if (op_.softcap > 0) cap(scores);
        if (first_seen > 0) std::fill(scores, scores + std::min(first_seen, kTileKeys), kUnseen);
        if (end_seen < kTileKeys) std::fill(scores + std::max(end_seen, 0), scores + kTileKeys, kUnseen);
        F32x16 most = F32x16::load(scores);
        for (int32_t i = 16; i < kTileKeys; i += 16) most = max(F32x16::load(scores + i), most);
        const float before = sums.maximum[row], maximum = std::max(before, largest(most));
        F32x16 total = F32x16::zero(), weights[kTileKeys / 16];
        for (int32_t i = 0; i < kTileKeys / 16; ++i) {
            weights[i] = numbers_.weight(F32x16::load(scores + 16 * i) - F32x16::set1(maximum));
            total = total + weights[i];
        }
        Numbers::store_weights(weights, scores);
        if (maximum > before) scale(row, factor_(F32x16::set1(before - maximum)), sums);
        sums.maximum[row] = maximum;
        sums.total[row] += sum(total);
    }

    void scale(int32_t row, F32x16 factor, Sums& sums) const {
        float* values = sums.values + row * sums_width_;
        for (int32_t i = 0; i < width_; i += 16) (F32x16::load(values + i) * factor).store(values + i);
        float lanes[16];
        (F32x16::set1(sums.total[row]) * factor).store(lanes);
        sums.total[row] = lanes[0];
    }

    void cap(float* scores) const {
        const F32x16 unit = F32x16::set1(Numbers::kScoreUnit);
        for (int32_t i = 0; i < kTileKeys; i += 16)
            (softcapped(F32x16::load(scores + i), op_.softcap) * unit).store(scores + i);
    }

    const AttentionOp& op_;
    const LayerPages pages_;
    const int32_t dim_, num_items_, width_;
    const int64_t sums_width_;
    const Numbers numbers_{};
    const Factor factor_{};
    float *queries_, *keys_, *turned_keys_, *values_, *scores_;
    LaneRows<Numbers> lanes_;
    LaneKeys lane_keys_;
    TilePlace coming_, last_place_;
    std::optional<KVTile> tiles_[2];
    int last_ = 0;  // of them
    Ahead ahead_;
};

}  // namespace kvarto::KVARTO_ISA
