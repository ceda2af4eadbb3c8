// Causal attention over pages, and what it needs beside its buffers.
#pragma once

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto {

struct AttentionLimits {
    int64_t max_tokens;   // rows of a step
    int64_t max_seqs;     // sequences of a step
    int64_t max_context;  // tokens of one sequence
};

namespace KVARTO_ISA {

// A team op: all workers call it at once.
void attention(const AttentionOp& op, const StepView& step, Worker& worker);

// Bytes of `AttentionOp::scratch`, enough for every step within the limits; the same for every instruction set.
int64_t attention_scratch_bytes(const HeadShape& heads, const AttentionLimits& limits, int32_t num_threads);

}  // namespace KVARTO_ISA

}  // namespace kvarto
