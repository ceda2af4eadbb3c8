// What a chunk of a row of logits holds, in a few numbers: made while the chunk is in a cache, so that sampling need
// not read a row again to know its maximum, its total, or which chunks can matter.
#pragma once

#include <cmath>
#include <cstdint>

namespace kvarto {

inline constexpr int32_t kChunk = 256;  // ids

struct ChunkSummary {
    float largest;        // NaN where the chunk holds one
    int32_t arg_largest;  // the lowest id that has it; meaningless where `largest` is NaN
    float sum_exp;        // of exp(x - largest); meaningless where `largest` is not finite, or it was not asked for
};

inline constexpr int32_t num_chunks(int32_t vocab_size) { return (vocab_size + kChunk - 1) / kChunk; }

// Bytes of the summary of a row.
inline constexpr int64_t summary_row_bytes(int32_t vocab_size) {
    return num_chunks(vocab_size) * int64_t{sizeof(ChunkSummary)};
}

}  // namespace kvarto

namespace kvarto::KVARTO_ISA {

// Of x[0 .. count - 1], which are the logits of ids from `first_id` on; count ≤ kChunk. Cost: two passes over what is in
// the first-level cache, about 1 cycle per 16 ids each; the sum about 8 more.
ChunkSummary summarise(const float* x, int32_t count, int32_t first_id, bool needs_sum);

}  // namespace kvarto::KVARTO_ISA
