// Logits by chunks of the vocabulary: as soon as a chunk of a few rows is multiplied, and still in a cache, it is scaled
// and summarised.
//
// Bounds: those of the product. What is added costs 2 to 10 cycles per 16 logits, on data that was just written.
#include "ops/logits.h"

#include <algorithm>
#include <cassert>

#include "ops/lanes.h"
#include "ops/linear_bf16.h"
#include "ops/linear_bf16x3.h"
#include "ops/linear_f32.h"
#include "ops/linear_int8.h"
#include "ops/logits_summary.h"
#include "ops/softcap.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kItemIds = 3 * kChunk;  // of one item of work; whole panels
constexpr int32_t kBlockRows = 192;       // that share one reading of the weights
static_assert(kChunk % kLanes == 0);

// Ids [first, last) of some rows.
struct Place {
    int32_t first_id;
    int32_t last_id;
    int32_t first_row;
    int32_t num_rows;
};

void scale_logits(const LogitsOp& op, float* x, int32_t count) {
    if (op.scale != 1.0F)
        each_vector(count, [&](int32_t i, int32_t here) {
            store_first(load_first(x + i, here) * F32x16::set1(op.scale), x + i, here);
        });
    if (op.softcap != 0.0F)
        each_vector(count, [&](int32_t i, int32_t here) {
            store_first(softcapped(load_first(x + i, here), op.softcap), x + i, here);
        });
}

// Log-probabilities were asked for: they need the total of the exponentials.
bool needs_sum(const StepView& step, int32_t row) { return step.sampling.num_logprobs[row] >= 0; }

void finish(const LogitsOp& op, const StepView& step, const Place& place) {
    for (int32_t row = place.first_row; row < place.first_row + place.num_rows; ++row) {
        auto* summaries = reinterpret_cast<ChunkSummary*>(op.summaries.data + row * op.summaries.row_bytes);
        for (int32_t id = place.first_id; id < place.last_id; id += kChunk) {
            const int32_t count = std::min(kChunk, place.last_id - id);
            float* x = op.linear.out.f32(row) + id;
            scale_logits(op, x, count);
            if (op.summaries.data != nullptr)
                summaries[id / kChunk] = summarise(x, count, id, needs_sum(step, row));
        }
    }
}

int32_t last_panel(const Place& place) { return (place.last_id + kLanes - 1) / kLanes; }

void multiply_f32(const LinearOp& op, const Place& place) {
    ProductRows rows;
    rows.x = op.x.f32(place.first_row);
    rows.x_stride = op.x.row_bytes / int64_t{sizeof(float)};
    rows.out = op.out.f32(place.first_row);
    rows.out_stride = op.out.row_bytes / int64_t{sizeof(float)};
    rows.num_rows = place.num_rows;
    const int32_t first_panel = place.first_id / kLanes;
    product_f32(op.weight.parts[0], op.weight.num_columns, first_panel, last_panel(place), rows, op.bias);
}

// Calls `f(place)` for each item that this worker takes: all of the vocabulary for the first block of rows, and so on.
template <class F> void each_item(const LinearOp& op, int32_t num_rows, int32_t block_rows, Worker& worker, F f) {
    const int32_t num_spans = (op.weight.num_rows + kItemIds - 1) / kItemIds;
    const int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
    for (int64_t item = worker.take(); item < num_blocks * num_spans; item = worker.take()) {
        const auto first_row = static_cast<int32_t>(item / num_spans) * block_rows;
        const auto first_id = static_cast<int32_t>(item % num_spans) * kItemIds;
        f(Place{first_id, std::min(first_id + kItemIds, op.weight.num_rows), first_row,
                std::min(block_rows, num_rows - first_row)});
    }
}

}  // namespace

void logits(const LogitsOp& op, const StepView& step, Worker& worker) {
    const LinearOp& linear = op.linear;
    assert(linear.weight.parts.size() == 1);
    if (step.num_samples == 0) return;
    const bool is_last = !step.is_updated(linear.index);
    const auto end = [&](const Place& place) {
        if (is_last) finish(op, step, place);
    };
#if defined(__AMX_BF16__)
    if (linear.products == Products::kBF16) {
        const BF16Rows rows = prepared_rows_bf16(linear, step, worker);
        return each_item(linear, step.num_samples, step.num_samples, worker, [&](const Place& place) {
            multiply_panels_bf16(linear.weight.parts[0], rows, place.first_id / kLanes, last_panel(place));
            end(place);
        });
    }
    if (linear.products == Products::kBF16x3) {
        const BF16x3Rows rows = prepared_rows_bf16x3(linear, step, worker);
        return each_item(linear, step.num_samples, step.num_samples, worker, [&](const Place& place) {
            multiply_panels_bf16x3(linear.weight.parts[0], rows, place.first_id / kLanes, last_panel(place));
            end(place);
        });
    }
#endif
    if (linear.products == Products::kInt8) {
        const Int8Rows rows = prepared_rows(linear, step, worker);
        each_item(linear, step.num_samples, step.num_samples, worker, [&](const Place& place) {
            multiply_panels(linear.weight.parts[0], rows, place.first_id / kLanes, last_panel(place));
            end(place);
        });
    } else {
        each_item(linear, step.num_samples, kBlockRows, worker, [&](const Place& place) {
            multiply_f32(linear, place);
            end(place);
        });
    }
}

void finish_logits(const LogitsOp& op, const StepView& step, Worker& worker) {
    each_item(op.linear, step.num_samples, kBlockRows, worker, [&](const Place& place) { finish(op, step, place); });
}

}  // namespace kvarto::KVARTO_ISA
