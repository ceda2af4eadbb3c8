// Whether a step stays inside what the program was planned for. Everything that an op uses as an address is looked at.
#pragma once

#include "core/step.h"

namespace kvarto {

struct StepBounds {
    int32_t max_tokens = 0;
    int32_t max_seqs = 0;
    int32_t max_samples = 0;
    int32_t max_positions = 0;  // of the model
    int32_t vocab_size = 0;
    int32_t num_groups = 0;
    int32_t num_pages = 0;
    int32_t page_size = 0;
};

// Throws std::invalid_argument that names the array and the number. Costs about a nanosecond per token, per sample and
// per page of each sequence's context.
void check_step(const StepView& step, const StepBounds& bounds);

}  // namespace kvarto
