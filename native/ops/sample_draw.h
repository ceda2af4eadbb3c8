// The draw: from a row of logits, temperature and filters to one id.
#pragma once

#include "core/step.h"
#include "ops/sample_candidates.h"

namespace kvarto::KVARTO_ISA {

// How row s of a step is drawn.
struct DrawRules {
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    uint64_t key;  // of the noise

    DrawRules(const SamplingView& sampling, int32_t s);
};

// The id of the largest of the row's logits, the lowest among equals. No chunk holds a NaN.
int32_t arg_max(const LogitsRow& row);

// The id drawn; temperature > 0. `work` has room for one number per chunk.
int32_t draw(const LogitsRow& row, const DrawRules& rules, Candidates& candidates, float* work);

}  // namespace kvarto::KVARTO_ISA
