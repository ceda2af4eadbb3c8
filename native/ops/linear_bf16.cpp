#include "ops/linear_bf16.h"

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kItemsPerWorker = 8;  // enough for workers to end together

// 32 columns of a row, to nearest even.
void round_group(const float* x, std::byte* out) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
    std::memcpy(out, &both, sizeof both);
}

BF16Rows rows_of(const LinearOp& op, const StepView& step) {
    return {.x = op.x, .num_rows = op.x.per_sample ? step.num_samples : step.num_tokens, .staged = op.scratch,
            .out = op.out.f32(0), .out_stride = op.out.row_bytes / int64_t{sizeof(float)}, .bias = op.bias};
}

}  // namespace

void stage_rows_bf16(const BF16Rows& rows, int32_t tile) {
    std::byte* out = rows.staged + int64_t{tile} * rows.num_groups() * kBF16TileBytes;
    const int32_t first = 16 * tile, count = std::min(rows.num_rows - first, 16);
    for (int32_t i = 0; i < count; ++i) {
        const float* x = rows.row(first + i);
        for (int32_t group = 0; group < rows.num_groups(); ++group)
            round_group(x + kGroup * group, out + group * kBF16TileBytes + 64 * i);
    }
    for (int32_t group = 0; group < rows.num_groups(); ++group)
        std::memset(out + group * kBF16TileBytes + 64 * count, 0, static_cast<size_t>(64 * (16 - count)));
}

void linear_bf16(const LinearOp& op, const StepView& step, Worker& worker) {
    BF16Rows rows = rows_of(op, step);
    if (rows.num_rows == 0) return;
    for (int64_t tile = worker.take(); tile < rows.num_tiles(); tile = worker.take())
        stage_rows_bf16(rows, static_cast<int32_t>(tile));
    worker.barrier();
    int64_t item = worker.take();
    int64_t first_item = 0;  // of this part
    for (const Part& part : op.weight.parts) {
        const int32_t share = part.num_panels() / (kItemsPerWorker * worker.num_workers());
        const auto panels = static_cast<int32_t>(align_up(std::max(1, share), 4));
        const int64_t num_items = (part.num_panels() + panels - 1) / panels;
        for (; item < first_item + num_items; item = worker.take()) {
            const auto first = static_cast<int32_t>((item - first_item) * panels);
            multiply_panels_bf16(part, rows, first, std::min(first + panels, part.num_panels()));
        }
        first_item += num_items;
        rows.out += part.num_rows;
        if (rows.bias != nullptr) rows.bias += part.num_rows;
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
