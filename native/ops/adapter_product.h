// What adapters add to the rows of a product: y[row, band] += scaling * (B (A x) + bias), straight from the pages.
//
// In two phases, with a barrier between: shrink, t[row, r] = sum over k of A[r, k] x[row, k], and expand,
// y[row, band] += scaling * (sum over r of B[:, r] t[row, r] + bias). x is read as it lies: narrow rows stand for the
// values that they were narrowed to. The order of the float32 steps is one everywhere, whatever the set (among those
// with fused multiply-add), the rows beside it and the thread:
//
//   t     sixteen lanes; lane k % 16 takes x[k] * A[r, k] for ascending k, fused; lanes are added as simd/vec16.h does
//   acc   0; for ascending r: acc = t[r] * B[:, r] + acc, fused
//   y     scaling * (acc + bias) + y, fused; without a bias it is not added. With a magnitude g, and the base's own bias
//         b, g * (scaling * (acc + bias) + (y - b)) + b, both fused
//
// Where rows are int8, strips stand for bfloat16 and the machine multiplies pairs of such numbers:
//
//   t     x rounded to bfloat16, to nearest even; lane k / 2 % 16 takes pairs of columns k, k + 1, one fused step each
//   acc   t rounded likewise; by pairs of ranks. What there is not counts as zero, and so do denormals
//   y     as above
//
// Where rows and strips are bfloat16 and there are matrix tiles, t and acc have the tiles' order: see adapter_tiles.h.
#pragma once

#include "core/adapters.h"
#include "core/threads.h"

namespace kvarto::KVARTO_ISA {

// Both are entered by all workers. Shrink only reads x: it may share a phase with the product, and takes side items.
// Of an embedding, A x is gathered.
void adapter_shrink(const AdapterWork& work, Worker& worker);
void adapter_expand(const AdapterWork& work, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
