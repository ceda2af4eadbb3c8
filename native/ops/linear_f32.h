// Products of float32 rows with a matrix in any format.
#pragma once

#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"
#include "weights/format.h"

namespace kvarto::KVARTO_ISA {

// The rows of a product: row i of the output comes from row `index[i]` of x, or from row i where `index` is null.
struct ProductRows {
    const float* x = nullptr;
    int64_t x_stride = 0;  // floats from one row to the next
    const int32_t* index = nullptr;
    float* out = nullptr;
    int64_t out_stride = 0;
    int32_t num_rows = 0;
};

// out[i, 16 · first_panel ..] = x[i] · w.T (+ bias) for panels [first_panel, last_panel) of a part; `out` and `bias` are
// those of the part's own row 0, and bias may be null. Every element is one chain of fused multiply-adds in ascending k,
// so its bits depend on x's row and the weight's row alone. Works on a thread's own stack.
void product_f32(const Part& part, int32_t num_columns, int32_t first_panel, int32_t last_panel,
                 const ProductRows& rows, const float* bias);

// The op, with products in float32: all workers of the team enter it.
void linear_f32(const LinearOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
