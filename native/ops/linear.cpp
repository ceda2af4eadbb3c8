#include "ops/linear.h"

#include "ops/linear_f32.h"
#include "ops/linear_int8.h"

namespace kvarto::KVARTO_ISA {

void linear(const LinearOp& op, const StepView& step, Worker& worker) {
    if (op.products == Products::kInt8)
        linear_int8(op, step, worker);
    else
        linear_f32(op, step, worker);
}

}  // namespace kvarto::KVARTO_ISA
