// Ids of a row that may be drawn, and the laws that thin them out. Ids are always in ascending order.
#pragma once

#include <cstdint>

#include "ops/logits_summary.h"

namespace kvarto::KVARTO_ISA {

// A row of logits with its summary.
struct LogitsRow {
    const float* logits;
    const ChunkSummary* chunks;
    int32_t size;
};

// Arrays have room for the whole vocabulary and sixteen more.
struct Candidates {
    int32_t* ids;
    float* values;
    int32_t count;
};

// All ids whose logit is at least `least`. Reads only chunks that have one; about 1 cycle per 16 ids of theirs.
void collect(const LogitsRow& row, float least, Candidates& candidates);

// A logit that at least `count` of the row's reach; -inf where the chunks' largest do not say. `work` has room for one
// number per chunk.
float reached_by(const LogitsRow& row, int32_t count, float* work);

// Keeps the `count` largest, lower ids first among equals.
void keep_largest(Candidates& candidates, int32_t count);

// Keeps the smallest set of the largest whose mass reaches `share` of `total`; mass is exp(value), and values are at
// most 0. Without a total that of the candidates is meant.
void keep_mass(Candidates& candidates, double share, const double* total);

}  // namespace kvarto::KVARTO_ISA
