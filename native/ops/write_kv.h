#pragma once

#include "core/ops.h"
#include "core/step.h"

namespace kvarto::KVARTO_ISA {

// A row op: stores the k and v heads of rows [first_row, last_row) of `qkv` at their slots.
void write_kv(const WriteKVOp& op, const StepView& step, int64_t first_row, int64_t last_row);

}  // namespace kvarto::KVARTO_ISA
