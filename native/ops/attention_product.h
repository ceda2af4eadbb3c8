// The product of attention_vectors.h, C = scale * C + A B: each element one chain over ascending items.
#pragma once

#include "ops/attention_keys.h"

namespace kvarto::KVARTO_ISA {

#if defined(__AVX512F__)
inline constexpr int kBlockRows = 4, kBlockVectors = 4;  // sixteen accumulators of thirty-two registers
#else
inline constexpr int kBlockRows = 2, kBlockVectors = 2;  // eight of sixteen, two to a vector
#endif

inline constexpr int32_t kLaneRows = 16;

// Items of A, row by row, and of sixteen rows side by side.
struct RowItems {
    const float* a;
    int64_t row;

    float at(int r, int32_t k) const { return a[r * row + k]; }
};
struct LaneItems {
    const float* a;

    float at(int r, int32_t k) const { return a[r + k * kLaneRows]; }
};

struct Products {
    float* c;
    int64_t stride;

    Products at(int32_t column) const { return {c + column, stride}; }
    float* place(int r, int v) const { return c + r * stride + 16 * v; }
    F32x16 before(int r, int v) const { return F32x16::load(place(r, v)); }
};

// What is there already is multiplied with a number of its row.
struct ScaledProducts : Products {
    const float* scale;

    ScaledProducts at(int32_t column) const { return {Products::at(column), scale}; }
    F32x16 before(int r, int v) const { return Products::before(r, v) * F32x16::set1(scale[r]); }
};

// Inlined, so that sums stay in registers.
template <class Numbers, int R, int V, class Left, class Out>
[[gnu::always_inline]] inline void multiply_block(Left left, const float* b, int64_t b_stride, int32_t first,
                                                  int32_t end, Out out, Ahead& ahead) {
    F32x16 sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = out.before(r, v);
    for (int32_t k = first; k < end; ++k) {
        ahead.ask();
        F32x16 row[V];
        for (int v = 0; v < V; ++v) row[v] = F32x16::load(b + k * b_stride + 16 * v);
        for (int r = 0; r < R; ++r) {
            const F32x16 x = F32x16::set1(left.at(r, k));
            for (int v = 0; v < V; ++v) sums[r][v] = Numbers::add_product(x, row[v], sums[r][v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v].store(out.place(r, v));
}

// Of few rows: apart from what surrounds it, whose variables would take its registers.
template <class Numbers, int R, int V, class Left, class Out>
[[gnu::noinline]] void multiply_few(Left left, const float* b, int64_t b_stride, int32_t first, int32_t end, Out out,
                                    Ahead& ahead) {
    multiply_block<Numbers, R, V>(left, b, b_stride, first, end, out, ahead);
}

// 1 to `kBlockRows` rows of `num_vectors` vectors. A chain's order is the same in every block.
template <class Numbers, int R = kBlockRows, class Left, class Out>
inline void multiply(Left left, const float* b, int64_t b_stride, int32_t first, int32_t end, Out out,
                     int32_t num_rows, int32_t num_vectors, Ahead& ahead) {
    if constexpr (R > 1)
        if (num_rows < R)
            return multiply<Numbers, R - 1>(left, b, b_stride, first, end, out, num_rows, num_vectors, ahead);
    int32_t v = 0;
    for (; v + kBlockVectors <= num_vectors; v += kBlockVectors)
        if constexpr (R == kBlockRows)
            multiply_block<Numbers, R, kBlockVectors>(left, b + 16 * v, b_stride, first, end, out.at(16 * v), ahead);
        else
            multiply_few<Numbers, R, kBlockVectors>(left, b + 16 * v, b_stride, first, end, out.at(16 * v), ahead);
    for (; v + 2 <= num_vectors; v += 2)
        multiply_block<Numbers, R, 2>(left, b + 16 * v, b_stride, first, end, out.at(16 * v), ahead);
    if (v < num_vectors)
        multiply_block<Numbers, R, 1>(left, b + 16 * v, b_stride, first, end, out.at(16 * v), ahead);
}

}  // namespace kvarto::KVARTO_ISA
