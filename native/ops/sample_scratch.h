// What a thread needs to sample a row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"
#include "ops/logits_summary.h"

namespace kvarto {

// One thread's slice of the scratch.
struct SampleScratch {
    int32_t* ids;                   // [vocab + 16], candidates
    float* values;                  // [vocab + 16], theirs
    float* row;                     // [vocab], a changed row
    ChunkSummary* summary;          // [chunks]
    ChunkSummary* changed_summary;  // [chunks]
    float* chunk_work;              // [chunks]

    SampleScratch(std::byte* slice, int32_t vocab_size) {
        const auto take = [&slice](int64_t size_bytes) {
            std::byte* place = slice;
            slice += align_up(size_bytes, 64);
            return place;
        };
        ids = reinterpret_cast<int32_t*>(take((int64_t{vocab_size} + 16) * 4));
        values = reinterpret_cast<float*>(take((int64_t{vocab_size} + 16) * 4));
        row = reinterpret_cast<float*>(take(int64_t{vocab_size} * 4));
        summary = reinterpret_cast<ChunkSummary*>(take(summary_row_bytes(vocab_size)));
        changed_summary = reinterpret_cast<ChunkSummary*>(take(summary_row_bytes(vocab_size)));
        chunk_work = reinterpret_cast<float*>(take(int64_t{num_chunks(vocab_size)} * 4));
        end = slice;
    }

    static int64_t size_bytes(int32_t vocab_size) {
        return SampleScratch(nullptr, vocab_size).end - static_cast<std::byte*>(nullptr);
    }

private:
    std::byte* end;
};

// Bytes of SampleOp's scratch.
inline int64_t sample_scratch_bytes(int32_t vocab_size, int32_t num_threads) {
    return SampleScratch::size_bytes(vocab_size) * num_threads;
}

}  // namespace kvarto
