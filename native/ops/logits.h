// The product with the vocabulary.
#pragma once

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto::KVARTO_ISA {

// out = softcap(scale * (x · weight.T + bias)), and a summary of each chunk of each row. All workers enter it.
void logits(const LogitsOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
