// Attention in products of bfloat16 tiles (AMX), sums in float32: strips of 128 keys, each a softmax of its own, merged
// in order.
//
//   scores   S^T [16 keys, queries] = K [16 keys, 32 dims] Q^T: pages are read as they lie, where they hold bfloat16
//            and 16 keys in a row; else they are first copied
//   weights  of 4, 8 or 16 queries at a time, bfloat16; see attention_amx_softmax.h
//   values   [16 queries, 16 dims] = P [16 queries, 32 keys] V: values are copied once per strip for all rows of a
//            unit, two keys to a pair, which is how a product wants them
//
// Up to four queries, a token that is decoded, get the same numbers without tiles; see attention_amx_few.h.
//
// Thirty-two queries share each tile of keys and of values that is loaded, where there are as many.
//
// Columns of values therefore come in another order than dims, which `in_order` undoes at the end.
//
// Cost of 16 queries and 64 keys at dim 64: 16 products of 16 cycles, and about 750 vector operations, two a cycle. Few
// rows are bound by reading K and V.
#pragma once

#if defined(__AMX_BF16__)

#include "ops/attention_amx_few.h"
#include "ops/attention_amx_softmax.h"
#include "ops/attention_bf16.h"
#include "ops/attention_keys.h"
#include "ops/attention_rows.h"
#include "ops/softcap.h"

namespace kvarto::KVARTO_ISA {

// 16 rows of 64 bytes each, but for 0, 1 and 2, of `num_queries` float32 or pairs.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    explicit constexpr TileShapes(int num_queries) {
        for (int tile = 0; tile < 8; ++tile) rows[tile] = 16, row_bytes[tile] = 64;
        for (int tile = 0; tile < 3; ++tile) row_bytes[tile] = static_cast<uint16_t>(4 * num_queries);
    }
};

class FastPath {
public:
    static constexpr int32_t kSpanTiles = kStripKeys / kTileKeys;
    static constexpr int32_t kShareTiles = kSpanTiles;
    static constexpr bool kAddsUp = false;  // a strip's sums are written
    using Factor = FastFactor;

    FastPath(const AttentionOp& op, Memory memory)
        : op_(op),
          pages_(op.pages, op.layer_slot, op.heads),
          dim_(op.heads.head_dim),
          width_(static_cast<int32_t>(padded_dim(op.heads))),
          query_rows_(memory.take<uint16_t>(kUnitRows * width_)),
          queries_(memory.take<uint16_t>(kUnitRows * width_)),
          keys_(memory.take<uint16_t>(kStripKeys * width_)),
          values_(memory.take<uint16_t>(kStripKeys * width_)),
          scores_(memory.take<float>(2 * kBlockScores)),
          weights_(memory.take<uint16_t>(2 * kBlockScores)),
          out_(memory.take<float>(16 * width_)) {}
    ~FastPath() { _tile_release(); }
    FastPath(const FastPath&) = delete;
    FastPath& operator=(const FastPath&) = delete;

    // Rows that will attend to tiles before `end_tile`.
    void start(const UnitRows& rows, int32_t end_tile) {
        end_tile_ = end_tile;
        load_queries(rows);
    }

    // The strip's softmax for rows [first_row, end_row): tiles [first_tile, end_tile) of a sequence's pages.
    void attend(const UnitRows& rows, int32_t first_row, int32_t end_row, const int32_t* table, int32_t context,
                int32_t kv_head, int32_t first_tile, int32_t end_tile, Sums& sums) {
        if (first_tile >= end_tile) return;
        if (end_row - first_row <= kFewRows && end_tile < end_tile_)
            ask_for(table, std::min(context, rows.end_key[end_row - 1]), end_tile,
                    std::min(end_tile + kSpanTiles, end_tile_), kv_head, end_row - first_row);
        if (end_row - first_row <= kFewQueries && can_stay()) {
            attend_few(rows, first_row, end_row, table, context, kv_head, first_tile, end_tile, sums);
            return;
        }
        lay_out(table, context, kv_head, first_tile, end_tile);
        lay_out_queries(first_row, end_row);
        const uint16_t* queries = queries_;
        int32_t row = first_row;
        for (; row + 32 <= end_row; row += 32, queries += 32 * width_) attend_two_blocks(rows, row, queries, sums);
        for (; row < end_row; row += 16, queries += 16 * width_) {
            const int32_t num_rows = std::min(16, end_row - row);
            if (num_rows <= 4)
                attend_block<4>(rows, row, num_rows, queries, sums);
            else if (num_rows <= 8)
                attend_block<8>(rows, row, num_rows, queries, sums);
            else
                attend_block<16>(rows, row, num_rows, queries, sums);
        }
    }

    // What so many rows will attend to next: [first_tile, end_tile), at most a strip.
    void ask_for(const int32_t* table, int32_t context, int32_t first_tile, int32_t end_tile, int32_t kv_head,
                 int32_t num_rows) {
        if (num_rows > kFewQueries || !can_stay()) return prefetch(table, context, first_tile, end_tile, kv_head);
        for (int32_t g = 0; g < (end_tile - first_tile) * kTileKeys / kGroupKeys; ++g)
            ahead_[g] = group_of(table, context, kv_head, first_tile * kTileKeys + g * kGroupKeys);
    }

    const float* in_order(const float* values, float* out) const {
        put_in_order(values, width_, out);
        return out;
    }

private:
    // Sixteen keys lie in pages as products read them.
    bool can_stay() const { return pages_.type == KVType::kBF16 && dim_ == width_ && pages_.page_size % 16 == 0; }

    // All at once, into the caches.
    void prefetch(const int32_t* table, int32_t context, int32_t first_tile, int32_t end_tile, int32_t kv_head) const {
        const int32_t end = std::min(end_tile * kTileKeys, context);
        for (int32_t key = first_tile * kTileKeys; key < end;) {
            const int32_t offset = key % pages_.page_size, run = std::min(pages_.page_size - offset, end - key);
            const int32_t page = table[key / pages_.page_size];
            for (const Plane which : {Plane::kKey, Plane::kValue}) {
                if (page < 0) break;
                const std::byte* p = pages_.plane(page, kv_head, which).token(offset, pages_.token_bytes);
                for (int64_t i = 0; i < run * pages_.token_bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
            }
            key += run;
        }
    }

    void attend_few(const UnitRows& rows, int32_t first_row, int32_t end_row, const int32_t* table, int32_t context,
                    int32_t kv_head, int32_t first_tile, int32_t end_tile, Sums& sums) {
        first_key_ = first_tile * kTileKeys;
        num_keys_ = (end_tile - first_tile) * kTileKeys;
        KeyGroup groups[kStripKeys / kGroupKeys];
        for (int32_t g = 0; g < num_keys_ / kGroupKeys; ++g)
            groups[g] = group_of(table, context, kv_head, first_key_ + g * kGroupKeys);
        switch (end_row - first_row) {
            case 1: return attend_few<1>(rows, first_row, groups, sums);
            case 2: return attend_few<2>(rows, first_row, groups, sums);
            case 3: return attend_few<3>(rows, first_row, groups, sums);
            default: return attend_few<4>(rows, first_row, groups, sums);
        }
    }

    template <int R> void attend_few(const UnitRows& rows, int32_t row, const KeyGroup* groups, Sums& sums) {
        alignas(64) float queries[R * kMaxHeadDim], weights[R * kStripKeys];
        const ReadOrder order{groups, ahead_, num_keys_ / kGroupKeys};
        widen_bf16(query_rows_ + row * width_, R * width_, queries);
        {
            const FlushDenormals flush;
            for (int32_t g = 0; g < order.num_groups; ++g) {
                float* scores = scores_ + g * kGroupKeys * kFewQueries;
                const std::byte* keys = groups[g].keys;
                if (keys != nullptr) score_few<R>(keys, width_, queries, scores, order.ahead_of_keys(g, keys));
                else std::fill_n(scores, kGroupKeys * kFewQueries, 0.0F);
            }
        }
        weigh_block<4>(rows, row, R, scores_, weights_, sums);
        for (int r = 0; r < R; ++r) widen_bf16(weights_ + r * kStripKeys, num_keys_, weights + r * kStripKeys);
        const FlushDenormals flush;
        add_values_few<R>(order, num_keys_, width_, weights, sums.values + row * sums.width, sums.width);
        std::fill_n(ahead_, kStripKeys / kGroupKeys, KeyGroup{});
    }

    KeyGroup group_of(const int32_t* table, int32_t context, int32_t kv_head, int32_t key) const {
        if (key >= context) return {};
        const int32_t page = table[key / pages_.page_size], offset = key % pages_.page_size;
        if (page < 0) return {};
        return {pages_.plane(page, kv_head, Plane::kKey).token(offset, pages_.token_bytes),
                pages_.plane(page, kv_head, Plane::kValue).token(offset, pages_.token_bytes),
                std::min(kGroupKeys, context - key)};
    }

    static constexpr int32_t kBlockScores = 16 * kStripKeys;

    // Sixteen elements of a head, 0 behind its end.
    __m512 load_dims(const float* head, int32_t first) const {
        const int32_t count = std::clamp(dim_ - first, 0, 16);
        return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << count) - 1), head + first);
    }

    void load_queries(const UnitRows& rows) {
        const float log2_e = 1.44269504F, scale = op_.softcap > 0 ? op_.scale : op_.scale * log2_e;
        for (int32_t r = 0; r < rows.num_rows; ++r) {
            const float* head = op_.qkv.f32(rows.token[r]) + rows.head[r] * dim_;
            for (int32_t i = 0; i < width_; i += 32) {
                const __m512 low = _mm512_mul_ps(load_dims(head, i), _mm512_set1_ps(scale));
                const __m512 high = _mm512_mul_ps(load_dims(head, i + 16), _mm512_set1_ps(scale));
                _mm512_store_ps(query_rows_ + r * width_ + i, bf16_pair(low, high));
            }
        }
        laid_first_ = laid_end_ = 0;
    }

    // Keys and values of the strip, for all rows that read them.
    void lay_out(const int32_t* table, int32_t context, int32_t kv_head, int32_t first_tile, int32_t end_tile) {
        first_key_ = first_tile * kTileKeys;
        num_keys_ = (end_tile - first_tile) * kTileKeys;
        for (int32_t tile = first_tile; tile < end_tile; ++tile) {
            const int32_t first = tile * kTileKeys - first_key_;
            switch (pages_.type) {
                case KVType::kF32: lay_out_tile<KVType::kF32>(table, context, tile, kv_head, first); break;
                case KVType::kF16: lay_out_tile<KVType::kF16>(table, context, tile, kv_head, first); break;
                case KVType::kBF16: lay_out_tile<KVType::kBF16>(table, context, tile, kv_head, first); break;
                case KVType::kInt8: lay_out_tile<KVType::kInt8>(table, context, tile, kv_head, first); break;
            }
        }
    }

    template <KVType kType>
    void lay_out_tile(const int32_t* table, int32_t context, int32_t tile, int32_t kv_head, int32_t first) {
        const TileTokens keys(pages_, table, context, tile, kv_head, Plane::kKey);
        for (int32_t key = 0; key < kTileKeys; key += 16) {
            const std::byte*& rows = key_rows_[(first + key) / 16];
            rows = keys.token[key];
            if (can_stay() && rows != nullptr) continue;
            rows = reinterpret_cast<const std::byte*>(keys_ + (first + key) * width_);
            for (int32_t i = key; i < key + 16; ++i) copy_key<kType>(keys, i, keys_ + (first + i) * width_);
        }
        const TileTokens values(pages_, table, context, tile, kv_head, Plane::kValue);
        uint16_t* pairs = values_ + first * width_;
        if (kType == KVType::kBF16 && dim_ == width_ && values.is_whole) return pair_whole_values(values, pairs);
        for (int32_t key = 0; key < kTileKeys; key += 2) pair_values<kType>(values, key, pairs + key * width_);
    }

    template <KVType kType> void copy_key(const TileTokens& keys, int32_t key, uint16_t* out) const {
        for (int32_t i = 0; i < width_; i += 32) _mm512_store_si512(out + i, load_bf16<kType>(keys, key, i, dim_));
    }

    template <KVType kType> void pair_values(const TileTokens& values, int32_t key, uint16_t* out) const {
        for (int32_t i = 0; i < width_; i += 32)
            store_pairs(load_bf16<kType>(values, key, i, dim_), load_bf16<kType>(values, key + 1, i, dim_),
                        out + 2 * i);
    }

    void pair_whole_values(const TileTokens& values, uint16_t* out) const {
        for (int32_t key = 0; key < kTileKeys; key += 2) {
            const std::byte *even = values.token[key], *odd = values.token[key + 1];
            for (int32_t i = 0; i < 2 * width_; i += 64, out += 64)
                store_pairs(_mm512_loadu_si512(even + i), _mm512_loadu_si512(odd + i), out);
        }
    }

    // Queries as a product wants them: for 32 dims, 16 rows of N pairs. Kept while the rows stay the same.
    void lay_out_queries(int32_t first_row, int32_t end_row) {
        if (laid_first_ == first_row && laid_end_ == end_row) return;
        laid_first_ = first_row, laid_end_ = end_row;
        uint16_t* out = queries_;
        for (int32_t row = first_row; row < end_row; row += 16, out += 16 * width_) {
            const int32_t num_rows = std::min(16, end_row - row), num_lanes = lanes_for(num_rows);
            const __mmask16 lanes = static_cast<__mmask16>((1U << num_lanes) - 1);
            for (int32_t i = 0; i < width_; i += 32) {
                F32x16 pairs[16];
                for (int32_t r = 0; r < 16; ++r) {
                    const auto* dims = reinterpret_cast<const float*>(query_rows_ + (row + r) * width_ + i);
                    pairs[r] = r < num_rows ? F32x16::load(dims) : F32x16::zero();
                }
                transpose16(pairs);
                for (int p = 0; p < 16; ++p)
                    _mm512_mask_storeu_ps(out + (i / 2 + p) * 2 * num_lanes, lanes, pairs[p].v);
            }
        }
    }
    static int32_t lanes_for(int32_t num_rows) { return num_rows <= 4 ? 4 : num_rows <= 8 ? 8 : 16; }

    template <int N>
    void attend_block(const UnitRows& rows, int32_t row, int32_t num_rows, const uint16_t* queries, Sums& sums) {
        set_shapes<N>();
        score<N>(queries);
        weigh_block<N>(rows, row, num_rows, scores_, weights_, sums);
        float* values = sums.values + row * sums.width;
        add_values(num_rows == 16 ? values : out_);
        if (num_rows < 16) std::copy_n(out_, num_rows * width_, values);
    }

    void attend_two_blocks(const UnitRows& rows, int32_t row, const uint16_t* queries, Sums& sums) {
        set_shapes<16>();
        score_two_blocks(queries);
        for (int32_t b = 0; b < 2; ++b)
            weigh_block<16>(rows, row + 16 * b, 16, scores_ + b * kBlockScores, weights_ + b * kBlockScores, sums);
        add_values_of_two_blocks(sums.values + row * sums.width);
    }

    // Weights of a block from its scores, and its maxima and totals.
    template <int N>
    void weigh_block(const UnitRows& rows, int32_t row, int32_t num_rows, float* scores, uint16_t* weights,
                     Sums& sums) {
        const QueryLanes<N> lanes(rows.first_key + row, rows.end_key + row, num_rows);
        if (op_.softcap > 0) cap(scores, num_keys_ * N);
        hide_unseen<N>(scores, first_key_, num_keys_, lanes);
        const __m512 most = largest_scores<N>(scores, num_keys_);
        const __m512 total = weigh<N>(scores, num_keys_, most, weights);
        const auto is_row = static_cast<__mmask16>((1U << num_rows) - 1);
        _mm512_mask_storeu_ps(sums.maximum + row, is_row, most);
        _mm512_mask_storeu_ps(sums.total + row, is_row, total);
    }

    template <int N> void set_shapes() {
        if (shapes_ == N) return;
        static constexpr TileShapes shapes(N);
        _tile_loadconfig(&shapes);
        shapes_ = N;
    }

    template <int N> void score(const uint16_t* queries) {
        const int64_t stride = 2 * width_;
        for (int32_t key = 0; key < num_keys_; key += 32) {
            const std::byte *first = key_rows_[key / 16], *last = key_rows_[key / 16 + 1];
            _tile_zero(0);
            _tile_zero(1);
            for (int32_t i = 0; i < width_; i += 32) {
                _tile_loadd(2, queries + i * N, 4 * N);
                _tile_loadd(3, first + 2 * i, stride);
                _tile_dpbf16ps(0, 3, 2);
                _tile_loadd(4, last + 2 * i, stride);
                _tile_dpbf16ps(1, 4, 2);
            }
            _tile_stored(0, scores_ + key * N, 4 * N);
            _tile_stored(1, scores_ + (key + 16) * N, 4 * N);
        }
    }

    // Thirty-two keys and as many queries at a time.
    void score_two_blocks(const uint16_t* queries) {
        const int64_t stride = 2 * width_;
        for (int32_t key = 0; key < num_keys_; key += 32) {
            const std::byte *first = key_rows_[key / 16], *last = key_rows_[key / 16 + 1];
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int32_t i = 0; i < width_; i += 32) {
                _tile_loadd(4, queries + i * 16, 64);
                _tile_loadd(6, first + 2 * i, stride);
                _tile_dpbf16ps(0, 6, 4);
                _tile_loadd(7, last + 2 * i, stride);
                _tile_dpbf16ps(1, 7, 4);
                _tile_loadd(5, queries + (width_ + i) * 16, 64);
                _tile_dpbf16ps(2, 6, 5);
                _tile_dpbf16ps(3, 7, 5);
            }
            _tile_stored(0, scores_ + key * 16, 64);
            _tile_stored(1, scores_ + (key + 16) * 16, 64);
            _tile_stored(2, scores_ + kBlockScores + key * 16, 64);
            _tile_stored(3, scores_ + kBlockScores + (key + 16) * 16, 64);
        }
    }

    void cap(float* scores, int32_t num_scores) const {
        const F32x16 log2_e = F32x16::set1(1.44269504F);
        for (int32_t i = 0; i < num_scores; i += 16)
            (softcapped(F32x16::load(scores + i), op_.softcap) * log2_e).store(scores + i);
    }

    void add_values(float* out) const {
        for (int32_t i = 0; i < width_; i += 32) {
            _tile_zero(4);
            _tile_zero(5);
            for (int32_t key = 0; key < num_keys_; key += 32) {
                const uint16_t* pairs = values_ + key * width_ + 2 * i;
                _tile_loadd(3, weights_ + key, 2 * kStripKeys);
                _tile_loadd(6, pairs, 4 * width_);
                _tile_dpbf16ps(4, 3, 6);
                _tile_loadd(7, pairs + 32, 4 * width_);
                _tile_dpbf16ps(5, 3, 7);
            }
            _tile_stored(4, out + i, 4 * width_);
            _tile_stored(5, out + i + 16, 4 * width_);
        }
    }

    // Thirty-two queries and as many dims at a time; the order of keys is that of one block.
    void add_values_of_two_blocks(float* out) const {
        for (int32_t i = 0; i < width_; i += 32) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int32_t key = 0; key < num_keys_; key += 32) {
                const uint16_t* pairs = values_ + key * width_ + 2 * i;
                _tile_loadd(4, weights_ + key, 2 * kStripKeys);
                _tile_loadd(6, pairs, 4 * width_);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, pairs + 32, 4 * width_);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, weights_ + kBlockScores + key, 2 * kStripKeys);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, out + i, 4 * width_);
            _tile_stored(1, out + i + 16, 4 * width_);
            _tile_stored(2, out + 16 * width_ + i, 4 * width_);
            _tile_stored(3, out + 16 * width_ + i + 16, 4 * width_);
        }
    }

    const AttentionOp& op_;
    const LayerPages pages_;
    const int32_t dim_, width_;
    int32_t end_tile_ = 0, shapes_ = 0, laid_first_ = 0, laid_end_ = 0, first_key_ = 0, num_keys_ = 0;
    const std::byte* key_rows_[kStripKeys / 16];
    KeyGroup ahead_[kStripKeys / kGroupKeys];
    uint16_t *query_rows_, *queries_, *keys_, *values_;
    float* scores_;
    uint16_t* weights_;
    float* out_;
};

}  // namespace kvarto::KVARTO_ISA

#endif
