// Activate and GatedActivation. Bound: about 20 operations per 16 elements for the exponential and a division, against
// 8 to 12 bytes per element moved: arithmetic, where the rows are in the L2 cache.
#include "ops/activation.h"

#include "ops/lanes.h"
#include "ops/row_ops.h"
#include "ops/write_row.h"

namespace kvarto::KVARTO_ISA {

void gated_activation(const GatedActivationOp& op, const StepView& step, int64_t first_row, int64_t last_row) {
    const int32_t num_rows = step.num_rows(op.out);
    if (op.is_fused && num_rows >= kFewestGatedRows && !step.is_updated(op.linear)) return;
    for (int64_t row = first_row; row < last_row; ++row) {
        const float *gate = op.x.f32(row), *up = gate + op.out.width;
        write_row(op.out, row, [&](int32_t first, int32_t count, float* out) {
            each_vector(count, [&](int32_t i, int32_t lanes) {
                const F32x16 x = activated(op.activation, load_first(gate + first + i, lanes));
                store_first(x * load_first(up + first + i, lanes), out + i, lanes);
            });
        });
    }
}

void activate(const ActivateOp& op, const StepView&, int64_t first_row, int64_t last_row) {
    for (int64_t row = first_row; row < last_row; ++row) {
        const float* x = op.x.f32(row);
        write_row(op.out, row, [&](int32_t first, int32_t count, float* out) {
            each_vector(count, [&](int32_t i, int32_t lanes) {
                store_first(activated(op.activation, load_first(x + first + i, lanes)), out + i, lanes);
            });
        });
    }
}

}  // namespace kvarto::KVARTO_ISA
