// Each token through its experts: pairs of (token, expert) are sorted by expert, so that an expert's weights are read once
// for all its tokens; a token's results add up by ascending expert, so that the order does not depend on the batch.
//
//   pairs sorted by expert ─> gate and up ─> act(gate) * up, in place ─> down ─> out[token] += share * row
#include <algorithm>

#include "ops/activation.h"
#include "ops/experts.h"
#include "ops/linear_f32.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kPanelsPerItem = 8;
constexpr int32_t kMaxChoices = 64;  // experts of one token

// The scratch, in pieces.
struct Pairs {
    int32_t num_tokens;  // rows of x
    int32_t* indptr;  // [num_experts + 1]: pairs of an expert
    int32_t* used;    // [num_experts]: experts that have pairs; indptr[num_experts + 1 ..] in memory
    int32_t* token;   // [num_pairs], by expert
    int32_t* place;   // [num_tokens, top_k]: the pair of each choice
    float* raised;    // [num_pairs, 2 * ffn]
    float* lowered;   // [num_pairs, hidden]
};

Pairs pairs_of(const ExpertsOp& op, const StepView& step) {
    const auto num_experts = static_cast<int64_t>(op.down.size());
    const int32_t num_tokens = step.num_rows(op.x);
    const int64_t num_pairs = int64_t{num_tokens} * op.top_k;
    auto* ints = reinterpret_cast<int32_t*>(op.scratch);
    Pairs pairs{};
    pairs.num_tokens = num_tokens;
    pairs.indptr = ints;
    pairs.used = ints + num_experts + 1;
    pairs.token = pairs.used + num_experts;
    pairs.place = pairs.token + num_pairs;
    const int64_t num_ints = num_experts + 1 + num_experts + 2 * num_pairs;
    pairs.raised = reinterpret_cast<float*>(op.scratch + align_up(num_ints * int64_t{sizeof(int32_t)}, 64));
    pairs.lowered = pairs.raised + num_pairs * op.gate_up[0].num_rows;
    return pairs;
}

// Counting sort; a token names an expert at most once. Returns how many experts are used.
int32_t sort_pairs(const ExpertsOp& op, const Pairs& pairs) {
    const auto num_experts = static_cast<int32_t>(op.down.size());
    std::fill(pairs.indptr, pairs.indptr + num_experts + 1, 0);
    for (int32_t t = 0; t < pairs.num_tokens; ++t)
        for (int32_t k = 0; k < op.top_k; ++k) ++pairs.indptr[op.ids.i32(t)[k] + 1];
    int32_t num_used = 0;
    for (int32_t e = 0; e < num_experts; ++e) {
        if (pairs.indptr[e + 1] > 0) pairs.used[num_used++] = e;
        pairs.indptr[e + 1] += pairs.indptr[e];
    }
    for (int32_t t = 0; t < pairs.num_tokens; ++t) {
        for (int32_t k = 0; k < op.top_k; ++k) {
            const int32_t pair = pairs.indptr[op.ids.i32(t)[k]]++;
            pairs.token[pair] = t;
            pairs.place[int64_t{t} * op.top_k + k] = pair;
        }
    }
    for (int32_t e = num_experts; e > 0; --e) pairs.indptr[e] = pairs.indptr[e - 1];
    pairs.indptr[0] = 0;
    return num_used;
}

int32_t num_used_experts(const ExpertsOp& op, const Pairs& pairs) {
    int32_t num_used = 0;
    for (size_t e = 0; e < op.down.size(); ++e) num_used += pairs.indptr[e + 1] > pairs.indptr[e];
    return num_used;
}

// Panels [first, first + kPanelsPerItem) of a weight, over its parts, with the rows of one expert.
void multiply(const Weight& weight, int32_t first, ProductRows rows) {
    float* out = rows.out;
    for (const Part& part : weight.parts) {
        const int32_t begin = std::max(first, 0);
        const int32_t end = std::min(first + kPanelsPerItem, part.num_panels());
        rows.out = out;
        if (begin < end) product_f32(part, weight.num_columns, begin, end, rows, nullptr);
        first -= part.num_panels();
        out += part.num_rows;
    }
}

int32_t num_panels(const Weight& weight) {
    int32_t count = 0;
    for (const Part& part : weight.parts) count += part.num_panels();
    return count;
}

// All products of one kind: items are (used expert, some panels).
template <class RowsOf>
void multiply_all(const std::vector<Weight>& weights, const Pairs& pairs, int32_t num_used, Worker& worker,
                  RowsOf rows_of) {
    const int32_t per_expert = (num_panels(weights[0]) + kPanelsPerItem - 1) / kPanelsPerItem;
    for (int64_t item; (item = worker.take()) < int64_t{num_used} * per_expert;) {
        const int32_t expert = pairs.used[item / per_expert];
        const int32_t first_panel = static_cast<int32_t>(item % per_expert) * kPanelsPerItem;
        multiply(weights[static_cast<size_t>(expert)], first_panel, rows_of(pairs.indptr[expert], pairs.indptr[expert + 1]));
    }
}

void activate_pair(const ExpertsOp& op, float* row, int32_t ffn) {
    int32_t i = 0;
    for (; i + kLanes <= ffn; i += kLanes)
        (activated(op.activation, F32x16::load(row + i)) * F32x16::load(row + ffn + i)).store(row + i);
    if (i == ffn) return;
    float gate[kLanes] = {}, up[kLanes] = {};
    std::copy(row + i, row + ffn, gate);
    std::copy(row + ffn + i, row + 2 * ffn, up);
    (activated(op.activation, F32x16::load(gate)) * F32x16::load(up)).store(gate);
    std::copy(gate, gate + (ffn - i), row + i);
}

// A token's choices by ascending expert.
void sort_choices(const int32_t* ids, int32_t top_k, int32_t* order) {
    for (int32_t k = 0; k < top_k; ++k) {
        int32_t at = k;
        for (; at > 0 && ids[order[at - 1]] > ids[k]; --at) order[at] = order[at - 1];
        order[at] = k;
    }
}

void combine(const ExpertsOp& op, const Pairs& pairs, int64_t token) {
    int32_t order[kMaxChoices];
    sort_choices(op.ids.i32(token), op.top_k, order);
    float* out = op.out.f32(token);
    const int32_t width = op.out.width;
    std::fill(out, out + width, 0.0F);
    for (int32_t k = 0; k < op.top_k; ++k) {
        const float share = op.shares.f32(token)[order[k]];
        const float* row = pairs.lowered + int64_t{pairs.place[token * op.top_k + order[k]]} * width;
        for (int32_t i = 0; i < width; ++i) out[i] = out[i] + share * row[i];
    }
}

}  // namespace

// Bound by reading the weights of the used experts when tokens are few, by multiply-adds when they are many.
void experts(const ExpertsOp& op, const StepView& step, Worker& worker) {
    const Pairs pairs = pairs_of(op, step);
    const int32_t ffn = op.down[0].num_columns;
    const int64_t num_pairs = int64_t{pairs.num_tokens} * op.top_k;
    if (worker.index() == 0) sort_pairs(op, pairs);
    worker.barrier();

    const int32_t num_used = num_used_experts(op, pairs);
    multiply_all(op.gate_up, pairs, num_used, worker, [&](int32_t first, int32_t last) {
        return ProductRows{.x = op.x.f32(0), .x_stride = op.x.row_bytes / int64_t{sizeof(float)},
                           .index = pairs.token + first, .out = pairs.raised + int64_t{first} * 2 * ffn,
                           .out_stride = 2 * int64_t{ffn}, .num_rows = last - first};
    });
    worker.barrier();
    for (int64_t pair; (pair = worker.take()) < num_pairs;) activate_pair(op, pairs.raised + pair * 2 * ffn, ffn);
    worker.barrier();
    multiply_all(op.down, pairs, num_used, worker, [&](int32_t first, int32_t last) {
        return ProductRows{.x = pairs.raised + int64_t{first} * 2 * ffn, .x_stride = 2 * int64_t{ffn},
                           .out = pairs.lowered + int64_t{first} * op.out.width, .out_stride = op.out.width,
                           .num_rows = last - first};
    });
    worker.barrier();
    for (int64_t token; (token = worker.take()) < pairs.num_tokens;) combine(op, pairs, token);
}

}  // namespace kvarto::KVARTO_ISA
