// Sixteen rows of queries side by side, one to a lane, and the keys of a tile one after the other: as they lie, for an item
// of a key meets an item of all rows. Softmax then has no sums across lanes.
//
// Cost per tile: 128 * dim / 16 vectors of products, of which a set does one in a cycle, and about ten operations for
// each key's weights. A row's arithmetic is that of rows one by one, bit for bit: its sum of weights too is taken by
// keys modulo 16 first, then by halves.
#pragma once

#include <limits>
#include <type_traits>

#include "ops/attention_product.h"
#include "ops/attention_rows.h"
#include "ops/lanes.h"
#include "ops/softcap.h"
#include "ops/transpose16.h"

namespace kvarto::KVARTO_ISA {

// Sums under way at once: of that many keys for one block of sixteen rows, or of half as many for more blocks, which
// broadcast fewer items for each product.
#if defined(__AVX512F__)
inline constexpr int32_t kLaneKeys = 16, kMostBlocks = 3;
#else
inline constexpr int32_t kLaneKeys = 4, kMostBlocks = 1;
#endif
inline constexpr int32_t kMostLaneRows = kMostBlocks * kLaneRows;

// Of so many, those that go first: two blocks and two are better than three and one.
constexpr int32_t lane_rows_together(int32_t num_rows) {
    return kMostBlocks == 3 && num_rows > kMostLaneRows ? 2 * kLaneRows : std::min(num_rows, kMostLaneRows);
}

// The keys of a tile, sixteen by sixteen: [16][num_items] each.
struct LaneKeys {
    const float* sixteen[kTileKeys / 16];
};

template <class Numbers> class LaneRows {
public:
    LaneRows(const AttentionOp& op, Memory& memory)
        : op_(op),
          num_items_(Numbers::num_items(op.heads.head_dim)),
          queries_(memory.take<float>(kUnitRows * num_items_)),
          scores_(memory.take<float>(kTileKeys * kMostLaneRows)),
          weights_(memory.take<float>(kTileKeys / Numbers::kTogether * kLaneRows)) {}

    // `queries`: [num_rows][num_items]
    void start(const float* queries, int32_t num_rows) {
        for (int32_t first = 0; first < num_rows; first += kLaneRows)
            for (int32_t i = 0; i < num_items_; i += 16) {
                F32x16 block[16];
                for (int32_t r = 0; r < 16; ++r)
                    block[r] = first + r < num_rows ? F32x16::load(queries + (first + r) * num_items_ + i) : F32x16::zero();
                transpose16(block);
                for (int32_t r = 0; r < 16; ++r) block[r].store(queries_ + first * num_items_ + (i + r) * kLaneRows);
            }
    }

    // Adds a tile to the sums of rows [first, first + num_rows), kMostLaneRows at most.
    void add_tile(const UnitRows& rows, int32_t first, int32_t num_rows, int32_t first_key, const LaneKeys& keys,
                  const float* values, int64_t width, Sums& sums, Ahead& ahead) {
        const Seen seen(rows, first, num_rows, first_key);
        if (seen.begin >= seen.end) return;
        const int32_t from = seen.begin / 16 * 16, to = static_cast<int32_t>(align_up(seen.end, 16));
        multiply_keys(queries_ + first * num_items_, keys, from, to, num_rows, ahead);
        for (int32_t r = 0; r < num_rows; r += kLaneRows) {
            float* scores = scores_ + r * kTileKeys;
            if (op_.softcap > 0) cap(scores, from, to);
            if (seen.all_begin > from || seen.all_end < to) hide(scores, first_key, from, to, rows, first + r);
            add_block(scores, seen, first + r, std::min(kLaneRows, num_rows - r), values, width, sums, ahead);
        }
    }

private:
    // What one of some rows sees of a tile, and what all see.
    struct Seen {
        int32_t begin = kTileKeys, end = 0, all_begin = 0, all_end = kTileKeys;

        Seen(const UnitRows& rows, int32_t first, int32_t num_rows, int32_t first_key) {
            for (int32_t r = first; r < first + num_rows; ++r) {
                begin = std::min(begin, rows.first_key[r] - first_key), end = std::max(end, rows.end_key[r] - first_key);
                all_begin = std::max(all_begin, rows.first_key[r] - first_key);
                all_end = std::min(all_end, rows.end_key[r] - first_key);
            }
            begin = std::max(begin, 0), end = std::min(end, kTileKeys);
        }
    };

    void multiply_keys(const float* queries, const LaneKeys& keys, int32_t from, int32_t to, int32_t num_rows,
                       Ahead& ahead) {
        if constexpr (kMostBlocks == 3) {
            if (num_rows > 2 * kLaneRows) return multiply_keys<3>(queries, keys, from, to, ahead);
            if (num_rows > kLaneRows) return multiply_keys<2>(queries, keys, from, to, ahead);
        }
        multiply_keys<1>(queries, keys, from, to, ahead);
    }

    // With the distance of keys as a constant where it is one of the usual: sixteen of them would else take as many
    // registers for their addresses.
    template <int kBlocks>
    void multiply_keys(const float* queries, const LaneKeys& keys, int32_t from, int32_t to, Ahead& ahead) {
        switch (num_items_) {
            case 32: return multiply_keys<kBlocks>(queries, keys, from, to, ahead, std::integral_constant<int32_t, 32>());
            case 64: return multiply_keys<kBlocks>(queries, keys, from, to, ahead, std::integral_constant<int32_t, 64>());
            case 128: return multiply_keys<kBlocks>(queries, keys, from, to, ahead, std::integral_constant<int32_t, 128>());
            default: return multiply_keys<kBlocks>(queries, keys, from, to, ahead, num_items_);
        }
    }

    template <int kBlocks, class Stride>
    void multiply_keys(const float* queries, const LaneKeys& keys, int32_t from, int32_t to, Ahead& ahead, Stride stride) {
        constexpr int kKeys = kBlocks == 1 ? kLaneKeys : kLaneKeys / 2;
        const int32_t num_used = Numbers::num_used_items(op_.heads.head_dim);
        const int32_t block_items = kLaneRows * stride;
        for (int32_t key = from; key < to; key += kKeys) {
            const float* some = keys.sixteen[key / 16] + key % 16 * stride;
            F32x16 sums[kBlocks][kKeys];
            for (int b = 0; b < kBlocks; ++b)
#pragma GCC unroll 16
                for (int j = 0; j < kKeys; ++j) sums[b][j] = F32x16::zero();
            for (int32_t k = 0; k < num_used; ++k) {
                ahead.ask();
                F32x16 query[kBlocks];
                for (int b = 0; b < kBlocks; ++b) query[b] = F32x16::load(queries + b * block_items + k * kLaneRows);
#pragma GCC unroll 16
                for (int j = 0; j < kKeys; ++j) {
                    const F32x16 item = F32x16::set1(some[j * stride + k]);
                    for (int b = 0; b < kBlocks; ++b) sums[b][j] = Numbers::add_product(item, query[b], sums[b][j]);
                }
            }
            for (int b = 0; b < kBlocks; ++b)
#pragma GCC unroll 16
                for (int j = 0; j < kKeys; ++j) sums[b][j].store(scores_ + (b * kTileKeys + key + j) * kLaneRows);
        }
    }

    // What a tile adds to sixteen rows, from their scores on.
    void add_block(float* scores, const Seen& seen, int32_t first, int32_t num_rows, const float* values, int64_t width,
                   Sums& sums, Ahead& ahead) {
        alignas(64) float factors[kLaneRows];
        weigh(scores, seen.begin / 16 * 16, seen.end, first, num_rows, factors, sums);
        for (int32_t r = 0; r < num_rows; r += kBlockRows)
            multiply<Numbers>(LaneItems{weights_ + r}, values, width, seen.begin / Numbers::kTogether,
                              (seen.end + Numbers::kTogether - 1) / Numbers::kTogether,
                              ScaledProducts{{sums.values + (first + r) * sums.width, sums.width}, factors + r},
                              std::min(kBlockRows, num_rows - r), static_cast<int32_t>(width / 16), ahead);
    }

    void cap(float* scores, int32_t from, int32_t to) const {
        const F32x16 unit = F32x16::set1(Numbers::kScoreUnit);
        for (float* score = scores + from * kLaneRows; score < scores + to * kLaneRows; score += kLaneRows)
            (softcapped(F32x16::load(score), op_.softcap) * unit).store(score);
    }

    static void hide(float* scores, int32_t first_key, int32_t from, int32_t to, const UnitRows& rows, int32_t first) {
        const I32x16 first_seen = I32x16::load(rows.first_key + first), end_seen = I32x16::load(rows.end_key + first);
        const F32x16 unseen = F32x16::set1(-std::numeric_limits<float>::infinity());
        for (int32_t key = from; key < to; ++key) {
            const I32x16 position = I32x16::set1(first_key + key);
            float* score = scores + key * kLaneRows;
            const F32x16 in_time = where_less(position, end_seen, F32x16::load(score), unseen);
            where_less(position, first_seen, unseen, in_time).store(score);
        }
    }

    static F32x16 largest_scores(const float* scores, int32_t from, int32_t end) {
        F32x16 most[4];
        for (int32_t i = 0; i < 4; ++i) most[i] = F32x16::load(scores + (from + i) * kLaneRows);
        for (int32_t key = from + 4; key < end; key += 4)
            for (int32_t i = 0; i < 4; ++i) most[i] = max(F32x16::load(scores + (key + i) * kLaneRows), most[i]);
        return max(max(most[0], most[1]), max(most[2], most[3]));
    }

    // Turns scores into weights up to the last key that one sees, and says what rows have so far must be scaled with.
    void weigh(const float* scores, int32_t from, int32_t end, int32_t first, int32_t num_rows, float* factors, Sums& sums) {
        const F32x16 before = F32x16::load(sums.maximum + first), most = max(largest_scores(scores, from, end), before);
        F32x16 totals[16];
        for (int32_t i = 0; i < 16; i += 2) {
            totals[i] = totals[i + 1] = F32x16::zero();
            for (int32_t key = from + i; key < end; key += 16) {
                const float* score = scores + key * kLaneRows;
                const F32x16 even = numbers_.weight(F32x16::load(score) - most);
                const F32x16 odd = numbers_.weight(F32x16::load(score + kLaneRows) - most);
                totals[i] = totals[i] + even, totals[i + 1] = totals[i + 1] + odd;
                Numbers::store_weights_of_two(even, odd, weights_ + key / Numbers::kTogether * kLaneRows);
            }
        }
        for (int32_t width = 8; width > 0; width /= 2)
            for (int32_t i = 0; i < width; ++i) totals[i] = totals[i] + totals[i + width];
        const F32x16 factor = factor_(before - most);
        factor.store(factors);
        store_first(most, sums.maximum + first, num_rows);
        store_first(F32x16::load(sums.total + first) * factor + totals[0], sums.total + first, num_rows);
    }

    const AttentionOp& op_;
    const int32_t num_items_;
    const Numbers numbers_{};
    const typename Numbers::Factor factor_{};
    float *queries_, *scores_, *weights_;  // [block][item][row], [block][key][row], [item of keys][row]
};

}  // namespace kvarto::KVARTO_ISA
