// Products of float32 rows with a matrix of floats, as precise as float32 and made of bfloat16: for machines with matrix
// tiles, and only there.
//
// A float32 is the sum of three bfloat16: each takes eight bits of its 24, and what is left goes into the next one.
//
//   x = x0 + x1 + x2   each the nearest even to what is left, of the row
//   w = w0 + w1 + w2   each cut off, of the weight; a float16 has two such parts, a bfloat16 is one
//
// Of the nine products of parts the six with the largest matter. The others are at most 2^-21 of x · w together, of either
// sign, and about 2^-24 in the mean square: as much as one rounding. Per group of 32 columns, from the first to the last,
// and whatever the rows beside it and the thread, for (i, j) of w and x in (0,2) (0,1) (1,1) (1,0) (0,0) (2,0):
//
//   even, odd = 0; for pairs of columns (k, k + 1), ascending: even = xj[k] wi[k] + even, odd = xj[k + 1] wi[k + 1] + odd
//   sum = sum + (even + odd)
//
// each step fused and rounded once, denormals zero. The bias is added last. A sum over an infinite value is NaN.
//
// Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations,
// ARITH 2019.
#pragma once

#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

namespace kvarto::KVARTO_ISA {

// The first parts of rows; the others follow, each as many bytes further.
struct BF16x3Rows {
    BF16Rows first;
    int64_t part_bytes = 0;
};

// The rows of an op in parts; entered by all workers.
BF16x3Rows prepared_rows_bf16x3(const LinearOp& op, const StepView& step, Worker& worker);

// Products of all rows with panels [first, last) of a part in float32, float16 or bfloat16, whose columns are whole
// groups of 32. No barrier, no allocation; any thread may take any panels.
void multiply_panels_bf16x3(const Part& part, const BF16x3Rows& rows, int32_t first, int32_t last);

// Its two ways: for one row, and for more.
void multiply_panels_bf16x3_by_row(const Part& part, const BF16x3Rows& rows, int32_t first, int32_t last);
void multiply_panels_bf16x3_by_tiles(const Part& part, const BF16x3Rows& rows, int32_t first, int32_t last);

// The whole op, entered by all workers.
void linear_bf16x3(const LinearOp& op, const StepView& step, Worker& worker);

}  // namespace kvarto::KVARTO_ISA

#endif
