#include "ops/linear.h"

#include <cassert>

#include "ops/linear_bf16.h"
#include "ops/linear_bf16x3.h"
#include "ops/linear_f32.h"
#include "ops/linear_int8.h"

namespace kvarto::KVARTO_ISA {

void linear(const LinearOp& op, const StepView& step, Worker& worker) {
    switch (op.products) {
        case Products::kF32: return linear_f32(op, step, worker);
        case Products::kInt8: return linear_int8(op, step, worker);
#if defined(__AMX_BF16__)
        case Products::kBF16: return linear_bf16(op, step, worker);
        case Products::kBF16x3: return linear_bf16x3(op, step, worker);
#else
        case Products::kBF16:
        case Products::kBF16x3: assert(false && "products in bfloat16 without matrix tiles");
#endif
    }
}

}  // namespace kvarto::KVARTO_ISA
