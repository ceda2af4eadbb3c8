// The rows whose next token is asked, one per sample. Bound: the bytes of those rows.
#include "ops/lanes.h"
#include "ops/row_ops.h"
#include "ops/write_row.h"

namespace kvarto::KVARTO_ISA {

void gather(const GatherOp& op, const StepView& step, int64_t first_row, int64_t last_row) {
    for (int64_t row = first_row; row < last_row; ++row) {
        const float* x = op.x.f32(step.sample_rows[row]);
        write_row(op.out, row, [&](int32_t first, int32_t count, float* out) {
            each_vector(count, [&](int32_t i, int32_t lanes) {
                store_first(load_first(x + first + i, lanes), out + i, lanes);
            });
        });
    }
}

}  // namespace kvarto::KVARTO_ISA
