// How `AttentionOp::scratch` is divided: for each thread its operands and sums and its plan, then the sums of spans
// whose units several threads share.
#pragma once

#include <algorithm>

#include "ops/attention_plan.h"
#include "ops/kv_page.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kLeastSpanTiles = 2;  // of all ways to compute

// Hands out pieces of a range of bytes, one after the other.
class Memory {
public:
    explicit Memory(std::byte* next) : next_(next) {}
    template <class T> T* take(int64_t count) {
        auto* piece = reinterpret_cast<T*>(next_);
        next_ += align_up(count * static_cast<int64_t>(sizeof(T)), 64);
        return piece;
    }

private:
    std::byte* next_;
};

// Elements of a row of sums: whole pairs of vectors.
constexpr int64_t padded_dim(const HeadShape& heads) { return align_up(heads.head_dim, 32); }

// Floats of a row of sums set aside: values, maximum and total, and its share of the padding to sixteen rows.
constexpr int64_t partial_floats(const HeadShape& heads) { return padded_dim(heads) + 16; }

// What one thread computes in; both ways to compute fit.
constexpr int64_t thread_bytes(const HeadShape& heads) {
    const int64_t dim = padded_dim(heads);
    const int64_t queries = kUnitRows * dim * 4, sums = 2 * kUnitRows * (dim + 2) * 4;
    // Queries by lanes; keys twice and values; scores of three blocks of sixteen rows, weights of one; scores of a few rows.
    const int64_t exact = kUnitRows * dim * 4 + 3 * kTileKeys * dim * 4 + (3 + 1 + 1) * 16 * kTileKeys * 4;
    const int64_t fast = kLeastSpanTiles * kTileKeys * (2 * dim * 2 + 32 * (4 + 2)) + 16 * dim * 4;
    return align_up(queries + sums + std::max(exact, fast), 64) + 4096;  // small pieces and their alignment
}

}  // namespace kvarto::KVARTO_ISA
