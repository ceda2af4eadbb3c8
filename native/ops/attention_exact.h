// Attention in float32 over pages of any type: tiles of 64 keys, whose sums add up in order inside spans of 1,024.
//
// A tile is laid out once for all rows of a unit: keys turned over, [dim][key], values as they are, [key][dim]. Scores
// and weighted sums are then the same small product, C += A B: each element one chain of fused multiply-adds, over
// ascending dims or keys. A key that a row does not see has weight 0, which changes nothing.
//
// Cost: 2 * 64 * dim multiply-adds per row and tile, bound by their rate; for few rows 64 shuffles per 256 elements to
// turn the keys over, below what it takes to read them from memory. So lines are asked for sixteen keys before their turn,
// in the order in which they are used: keys, values, and the next tile's keys.
#pragma once

#include <limits>

#include "ops/attention_keys.h"
#include "ops/attention_rows.h"
#include "ops/lanes.h"
#include "ops/softcap.h"
#include "ops/transpose16.h"

namespace kvarto::KVARTO_ISA {

#if defined(__AVX512F__)
inline constexpr int kBlockRows = 4, kBlockVectors = 4;  // sixteen accumulators of thirty-two registers
#else
inline constexpr int kBlockRows = 2, kBlockVectors = 2;  // eight of sixteen, two to a vector
#endif

// c[r][0..16 V) += sum over k of a[r][k] * b[k][0..16 V), k ascending.
template <int R, int V>
inline void multiply_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int32_t first,
                           int32_t end, float* c, int64_t c_stride) {
    F32x16 sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = F32x16::load(c + r * c_stride + 16 * v);
    for (int32_t k = first; k < end; ++k) {
        F32x16 row[V];
        for (int v = 0; v < V; ++v) row[v] = F32x16::load(b + k * b_stride + 16 * v);
        for (int r = 0; r < R; ++r) {
            const F32x16 x = F32x16::set1(a[r * a_stride + k]);
            for (int v = 0; v < V; ++v) sums[r][v] = fma(x, row[v], sums[r][v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v].store(c + r * c_stride + 16 * v);
}

// The same for `num_vectors` vectors and 1 to `kBlockRows` rows. A chain's order is the same in every block.
template <int R>
inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int32_t first, int32_t end,
                     float* c, int64_t c_stride, int32_t num_rows, int32_t num_vectors) {
    if constexpr (R > 1)
        if (num_rows < R)
            return multiply<R - 1>(a, a_stride, b, b_stride, first, end, c, c_stride, num_rows, num_vectors);
    int32_t v = 0;
    for (; v + kBlockVectors <= num_vectors; v += kBlockVectors)
        multiply_block<R, kBlockVectors>(a, a_stride, b + 16 * v, b_stride, first, end, c + 16 * v, c_stride);
    for (; v < num_vectors; ++v)
        multiply_block<R, 1>(a, a_stride, b + 16 * v, b_stride, first, end, c + 16 * v, c_stride);
}

// Exactly 1 at 0, exactly 0 far below: taking away the least result of `exp` changes nothing above 1e-30.
struct ExactFactor {
    F32x16 least = exp(F32x16::set1(-FLT_MAX));
    F32x16 operator()(F32x16 x) const { return exp(x) - least; }
};

class ExactPath {
public:
    static constexpr int32_t kSpanTiles = 16;
    static constexpr int32_t kShareTiles = 1;
    static constexpr bool kAddsUp = true;  // to sums that are 0 at first
    using Factor = ExactFactor;

    ExactPath(const AttentionOp& op, Memory memory)
        : op_(op),
          pages_(op.pages, op.layer_slot, op.heads),
          dim_(op.heads.head_dim),
          width_(padded_dim(op.heads)),
          queries_(memory.take<float>(kUnitRows * width_)),
          keys_(memory.take<float>(kTileKeys * width_)),
          values_(memory.take<float>(kTileKeys * width_)),
          scores_(memory.take<float>(kBlockRows * kTileKeys)) {}

    // The first keys of what comes next; the path looks ahead itself within it.
    void ask_for(const int32_t* table, int32_t context, int32_t first_tile, int32_t end_tile, int32_t kv_head, int32_t) {
        if (first_tile >= end_tile) return;
        const TileTokens keys(pages_, table, context, first_tile, kv_head, Plane::kKey);
        for (int32_t key = 0; key < kKeysAhead; ++key)
            for (int64_t byte = 0; byte < pages_.token_bytes; byte += 64) ask_for_line(keys.token[key], byte);
    }

    // Rows that will attend to tiles before `end_tile`.
    void start(const UnitRows& rows, int32_t) {
        const F32x16 scale = F32x16::set1(op_.scale);
        for (int32_t r = 0; r < rows.num_rows; ++r) {
            const float* head = op_.qkv.f32(rows.token[r]) + rows.head[r] * dim_;
            float* query = queries_ + r * width_;
            each_vector(dim_, [&](int32_t i, int32_t n) { (load_first(head + i, n) * scale).store(query + i); });
        }
    }

    // Adds the tiles [first_tile, end_tile) of a sequence's pages to the sums of rows [first_row, end_row).
    void attend(const UnitRows& rows, int32_t first_row, int32_t end_row, const int32_t* table, int32_t context,
                int32_t kv_head, int32_t first_tile, int32_t end_tile, Sums& sums) {
        for (int32_t tile = first_tile; tile < end_tile; ++tile) {
            const TileTokens keys(pages_, table, context, tile, kv_head, Plane::kKey);
            const TileTokens values(pages_, table, context, tile, kv_head, Plane::kValue);
            // Behind the last tile is nothing to ask for here: it asks for what it has.
            const TileTokens next(pages_, table, context, std::min(tile + 1, end_tile - 1), kv_head, Plane::kKey);
            lay_out(keys, values, next);
            for (int32_t r = first_row; r < end_row; r += kBlockRows)
                add_tile(rows, r, std::min(kBlockRows, end_row - r), tile * kTileKeys, sums);
        }
    }

    // Values of a row, in the order of dims.
    const float* in_order(const float* values, float*) const { return values; }

private:
    static constexpr int32_t kKeysAhead = 16;

    static void ask_for_line(const std::byte* token, int64_t byte) {
        if (token != nullptr) __builtin_prefetch(token + byte);
    }

    void lay_out(const TileTokens& keys, const TileTokens& values, const TileTokens& next) {
        switch (pages_.type) {
            case KVType::kF32: return lay_out_as<KVType::kF32>(keys, values, next);
            case KVType::kF16: return lay_out_as<KVType::kF16>(keys, values, next);
            case KVType::kBF16: return lay_out_as<KVType::kBF16>(keys, values, next);
            case KVType::kInt8: return lay_out_as<KVType::kInt8>(keys, values, next);
        }
    }

    template <KVType kType>
    void lay_out_as(const TileTokens& keys, const TileTokens& values, const TileTokens& next) {
        constexpr int32_t kLineElements = 64 / element_bytes(kType);
        for (int32_t key = 0; key < kTileKeys; key += 16) {
            const std::byte* const* ahead = key + 16 < kTileKeys ? keys.token + key + 16 : values.token;
            for (int32_t i = 0; i < dim_; i += 16) {
                F32x16 block[16];
                for (int j = 0; j < 16; ++j) {
                    if (i % kLineElements == 0) ask_for_line(ahead[j], i * element_bytes(kType));
                    block[j] = load_token<kType>(keys, key + j, i, dim_);
                }
                transpose16(block);
                for (int j = 0; j < 16; ++j) block[j].store(keys_ + (i + j) * kTileKeys + key);
            }
        }
        for (int32_t key = 0; key < kTileKeys; ++key) {
            const int32_t ahead = key + kKeysAhead;
            const std::byte* line = ahead < kTileKeys ? values.token[ahead] : next.token[ahead - kTileKeys];
            for (int32_t i = 0; i < dim_; i += 16) {
                if (i % kLineElements == 0) ask_for_line(line, i * element_bytes(kType));
                load_token<kType>(values, key, i, dim_).store(values_ + key * width_ + i);
            }
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
        multiply<kBlockRows>(queries_ + row * width_, width_, keys_, kTileKeys, 0, dim_, scores_, kTileKeys, num_rows,
                             kTileKeys / 16);
        for (int32_t r = 0; r < num_rows; ++r)
            weigh(scores_ + r * kTileKeys, rows.first_key[row + r] - first_key, rows.end_key[row + r] - first_key,
                  row + r, sums);
        multiply<kBlockRows>(scores_, kTileKeys, values_, width_, begin, end, sums.values + row * width_, width_,
                             num_rows, (dim_ + 15) / 16);
    }

    // Turns a row's scores into weights, and scales what the row has so far to the new maximum.
    void weigh(float* scores, int32_t first_seen, int32_t end_seen, int32_t row, Sums& sums) const {
        constexpr float kUnseen = -std::numeric_limits<float>::infinity();
        if (op_.softcap > 0) cap(scores);
        std::fill(scores, scores + std::clamp(first_seen, 0, kTileKeys), kUnseen);
        std::fill(scores + std::clamp(end_seen, 0, kTileKeys), scores + kTileKeys, kUnseen);
        F32x16 most = F32x16::load(scores);
        for (int32_t i = 16; i < kTileKeys; i += 16) most = max(F32x16::load(scores + i), most);
        const float before = sums.maximum[row], maximum = std::max(before, largest(most));
        F32x16 total = F32x16::zero();
        for (int32_t i = 0; i < kTileKeys; i += 16) {
            const F32x16 weight = factor_(F32x16::load(scores + i) - F32x16::set1(maximum));
            weight.store(scores + i);
            total = total + weight;
        }
        if (maximum > before) scale(row, factor_(F32x16::set1(before - maximum)), sums);
        sums.maximum[row] = maximum;
        sums.total[row] += sum(total);
    }

    void scale(int32_t row, F32x16 factor, Sums& sums) const {
        float* values = sums.values + row * width_;
        for (int32_t i = 0; i < dim_; i += 16) (F32x16::load(values + i) * factor).store(values + i);
        float lanes[16];
        (F32x16::set1(sums.total[row]) * factor).store(lanes);
        sums.total[row] = lanes[0];
    }

    void cap(float* scores) const {
        for (int32_t i = 0; i < kTileKeys; i += 16) softcapped(F32x16::load(scores + i), op_.softcap).store(scores + i);
    }

    const AttentionOp& op_;
    const LayerPages pages_;
    const int32_t dim_;
    const int64_t width_;
    const ExactFactor factor_;
    float *queries_, *keys_, *values_, *scores_;
};

}  // namespace kvarto::KVARTO_ISA
