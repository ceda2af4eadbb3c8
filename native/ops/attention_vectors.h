// Attention in vectors over pages of any type: tiles of 64 keys, whose sums add up in order inside spans of 1,024. In
// float32, or in pairs of bfloat16: `Numbers` is ExactNumbers or PairNumbers, which say what an item of four bytes is.
//
// A tile is laid out once for all rows of a unit: keys turned over, [item of dims][key], values [item of keys][dim].
// Scores and weighted sums are then the same small product, C += A B: each element one chain over ascending dims or keys.
// A key that a row does not see has weight 0, which changes nothing.
//
// Cost: 2 * 64 * dim multiply-adds per row and tile, bound by their rate; for few rows 64 shuffles per 256 items to
// turn the keys over, about what it takes to read them from memory. So the next tile is asked for all along, a token at a
// time: asked for at once, lines are more than the machine keeps track of, and memory stands idle afterwards.
#pragma once

#include <limits>
#include <optional>

#include "ops/attention_keys.h"
#include "ops/attention_rows.h"
#include "ops/lanes.h"
#include "ops/prefetch.h"
#include "ops/softcap.h"
#include "ops/transpose16.h"

namespace kvarto::KVARTO_ISA {

#if defined(__AVX512F__)
inline constexpr int kBlockRows = 4, kBlockVectors = 4;  // sixteen accumulators of thirty-two registers
#else
inline constexpr int kBlockRows = 2, kBlockVectors = 2;  // eight of sixteen, two to a vector
#endif

struct Tile {
    TileTokens keys, values;
};

// Asks for the tokens of a tile one by one, keys first.
class Ahead {
public:
    Ahead() = default;
    Ahead(const Tile& tile, int64_t token_bytes) : tile_(&tile), token_bytes_(token_bytes), left_(2 * kTileKeys) {}

    void ask() {
        if (left_ == 0) return;
        const int32_t index = 2 * kTileKeys - left_--;
        const std::byte* token = index < kTileKeys ? tile_->keys.token[index] : tile_->values.token[index - kTileKeys];
        if (token == nullptr) return;
        for (int64_t byte = 0; byte < token_bytes_; byte += 64) prefetch_to_second_level(token + byte);
    }

private:
    const Tile* tile_ = nullptr;
    int64_t token_bytes_ = 0;
    int32_t left_ = 0;
};

// c[r][0..16 V) += sum over items k of a[r][k] * b[k][0..16 V), k ascending.
template <class Numbers, int R, int V>
inline void multiply_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int32_t first,
                           int32_t end, float* c, int64_t c_stride, Ahead& ahead) {
    F32x16 sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = F32x16::load(c + r * c_stride + 16 * v);
    for (int32_t k = first; k < end; ++k) {
        ahead.ask();
        F32x16 row[V];
        for (int v = 0; v < V; ++v) row[v] = F32x16::load(b + k * b_stride + 16 * v);
        for (int r = 0; r < R; ++r) {
            const F32x16 x = F32x16::set1(a[r * a_stride + k]);
            for (int v = 0; v < V; ++v) sums[r][v] = Numbers::add_product(x, row[v], sums[r][v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v].store(c + r * c_stride + 16 * v);
}

// The same for `num_vectors` vectors and 1 to `kBlockRows` rows. A chain's order is the same in every block.
template <class Numbers, int R = kBlockRows>
inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int32_t first, int32_t end,
                     float* c, int64_t c_stride, int32_t num_rows, int32_t num_vectors, Ahead& ahead) {
    if constexpr (R > 1)
        if (num_rows < R)
            return multiply<Numbers, R - 1>(a, a_stride, b, b_stride, first, end, c, c_stride, num_rows, num_vectors,
                                            ahead);
    int32_t v = 0;
    for (; v + kBlockVectors <= num_vectors; v += kBlockVectors)
        multiply_block<Numbers, R, kBlockVectors>(a, a_stride, b + 16 * v, b_stride, first, end, c + 16 * v, c_stride,
                                                  ahead);
    for (; v + 2 <= num_vectors; v += 2)
        multiply_block<Numbers, R, 2>(a, a_stride, b + 16 * v, b_stride, first, end, c + 16 * v, c_stride, ahead);
    if (v < num_vectors)
        multiply_block<Numbers, R, 1>(a, a_stride, b + 16 * v, b_stride, first, end, c + 16 * v, c_stride, ahead);
}

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
          values_(memory.take<float>(kTileKeys / kTogether * width_)),
          scores_(memory.take<float>(kBlockRows * kTileKeys)) {}

    // What comes after the tiles that are attended to next.
    void ask_for(const int32_t* table, int32_t context, int32_t first_tile, int32_t end_tile, int32_t kv_head, int32_t) {
        if (first_tile < end_tile) coming_ = tile_of(table, context, kv_head, first_tile);
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
    }

    // Adds the tiles [first_tile, end_tile) of a sequence's pages to the sums of rows [first_row, end_row).
    void attend(const UnitRows& rows, int32_t first_row, int32_t end_row, const int32_t* table, int32_t context,
                int32_t kv_head, int32_t first_tile, int32_t end_tile, Sums& sums) {
        if (first_tile >= end_tile) return;
        Tile here = tile_of(table, context, kv_head, first_tile);
        for (int32_t tile = first_tile; tile < end_tile; ++tile) {
            std::optional<Tile> next;
            if (tile + 1 < end_tile)
                next = tile_of(table, context, kv_head, tile + 1);
            else
                next.swap(coming_);
            ahead_ = next ? Ahead(*next, pages_.token_bytes) : Ahead();
            lay_out(here);
            for (int32_t r = first_row; r < end_row; r += kBlockRows)
                add_tile(rows, r, std::min(kBlockRows, end_row - r), tile * kTileKeys, sums);
            if (next) here = *next;
        }
    }

    // Values of a row, in the order of dims.
    const float* in_order(const float* values, float* out) const { return Numbers::in_order(values, dim_, out); }

private:
    static constexpr int32_t kTogether = Numbers::kTogether;

    Tile tile_of(const int32_t* table, int32_t context, int32_t kv_head, int32_t tile) const {
        return {{pages_, table, context, tile, kv_head, Plane::kKey}, {pages_, table, context, tile, kv_head, Plane::kValue}};
    }

    void lay_out(const Tile& tile) {
        switch (pages_.type) {
            case KVType::kF32: return lay_out_as<KVType::kF32>(tile);
            case KVType::kF16: return lay_out_as<KVType::kF16>(tile);
            case KVType::kBF16: return lay_out_as<KVType::kBF16>(tile);
            case KVType::kInt8: return lay_out_as<KVType::kInt8>(tile);
        }
    }

    template <KVType kType> void lay_out_as(const Tile& tile) {
        constexpr int32_t kDims = 16 * kTogether;  // of a vector of items
        for (int32_t key = 0; key < kTileKeys; key += 16) {
            for (int j = 0; j < 8; ++j) ahead_.ask();
            for (int32_t i = 0; i < num_items_; i += 16) {
                F32x16 block[16];
                for (int j = 0; j < 16; ++j)
                    block[j] = Numbers::template load<kType>(tile.keys, key + j, i * kTogether, dim_);
                transpose16(block);
                for (int j = 0; j < 16; ++j) block[j].store(keys_ + (i + j) * kTileKeys + key);
            }
        }
        for (int32_t key = 0; key < kTileKeys; key += kTogether) {
            ahead_.ask();
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
        multiply<Numbers>(queries_ + row * num_items_, num_items_, keys_ + first, kTileKeys, 0,
                          Numbers::num_used_items(dim_), scores_ + first, kTileKeys, num_rows, num_vectors, ahead_);
        for (int32_t r = 0; r < num_rows; ++r)
            weigh(scores_ + r * kTileKeys, rows.first_key[row + r] - first_key, rows.end_key[row + r] - first_key,
                  row + r, sums);
        multiply<Numbers>(scores_, kTileKeys, values_, width_, begin / kTogether, (end + kTogether - 1) / kTogether,
                          sums.values + row * sums_width_, sums_width_, num_rows, width_ / 16, ahead_);
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
    float *queries_, *keys_, *values_, *scores_;
    std::optional<Tile> coming_;
    Ahead ahead_;
};

}  // namespace kvarto::KVARTO_ISA
