// Attention: prefill, decode and mixed batches alike. Items of work (see attention_plan.h) go to threads; each item
// walks its spans in order, and where an item has only some of a unit's spans, their sums are merged in a second phase.
//
// Source: FlashAttention (arXiv:2205.14135), online softmax (arXiv:1805.02867), PagedAttention (arXiv:2309.06180).
#include "ops/attention.h"

#include <utility>

#include "ops/attention_amx.h"
#include "ops/attention_exact.h"
#include "ops/attention_pairs.h"
#include "ops/attention_vectors.h"

namespace kvarto::KVARTO_ISA {

namespace {

template <class Path> class Attention {
public:
    Attention(const AttentionOp& op, const StepView& step, Worker& worker)
        : op_(op),
          step_(step),
          worker_(worker),
          memory_(op.scratch + worker.index() * slice_bytes(op, step)),
          partials_(reinterpret_cast<float*>(op.scratch + worker.num_workers() * slice_bytes(op, step))),
          span_(memory_, op.heads),
          sums_(memory_, op.heads),
          plan_(op, step, Path::kSpanTiles, Path::kShareTiles, worker.num_workers(), num_partial_rows(),
                memory_.take<std::byte>(AttentionPlan::memory_bytes(op.heads, step.num_tokens, step.num_seqs))),
          path_(op, memory_) {}

    // The next item is taken before this one is done, so that its first strip can be on its way: what is left at the end
    // is small, for the dearest units come first.
    void run() {
        for (Taken item = take(); item.unit != nullptr;) {
            const Taken next = take();
            run_item(item, next);
            item = next;
        }
        if (plan_.has_partials()) merge_units();
    }

private:
    struct Taken {
        const Unit* unit = nullptr;  // null behind the last
        Item item{};
    };

    Taken take() {
        const int64_t item = worker_.take();
        if (item >= plan_.num_items()) return {};
        while (item >= first_item_ + plan_.num_items(plan_.unit(unit_))) first_item_ += plan_.num_items(plan_.unit(unit_++));
        const Unit& unit = plan_.unit(unit_);
        return {&unit, plan_.item(unit, static_cast<int32_t>(item - first_item_))};
    }

    static int64_t slice_bytes(const AttentionOp& op, const StepView& step) {
        return thread_bytes(op.heads) + AttentionPlan::memory_bytes(op.heads, step.num_tokens, step.num_seqs);
    }
    int64_t num_partial_rows() const {
        const int64_t used = worker_.num_workers() * slice_bytes(op_, step_);
        return (op_.scratch_bytes - used) / (4 * partial_floats(op_.heads));
    }
    // Where the sums of one span of a unit lie that several items share.
    float* partial(const Unit& unit, int32_t kv_head, int32_t span) const {
        const int64_t stretch = int64_t{kv_head} * plan_.num_spans(unit) + span;
        return partials_ + (unit.first_partial + stretch * unit.num_rows) * partial_floats(op_.heads);
    }

    void run_item(const Taken& taken, const Taken& next) {
        const Unit& unit = *taken.unit;
        const Item& item = taken.item;
        for (int32_t head = item.first_head; head < item.end_head; ++head) {
            const UnitRows rows(plan_, op_.heads, unit, head);
            path_.start(rows, plan_.first_tile(unit, item.spans.end));
            for (int32_t span = item.spans.first; span < item.spans.end; ++span) {
                if (unit.num_seqs > 1 || Path::kAddsUp) span_.clear(rows.num_rows);
                run_span(unit, rows, head, plan_.first_tile(unit, span), [&] {
                    if (span + 1 < item.spans.end) return;
                    if (head + 1 < item.end_head) ask_for(unit, head + 1, item.spans.first);
                    else if (next.unit != nullptr) ask_for(*next.unit, next.item.first_head, next.item.spans.first);
                });
                if (plan_.is_split(unit))
                    set_aside(rows, partial(unit, head, span));
                else if (span == 0)
                    std::swap(sums_, span_);
                else
                    merge(sums_, span_, rows.num_rows, factor_);
            }
            if (!plan_.is_split(unit)) write(rows);
        }
    }

    // Begins to read the strip with which a head or an item begins: within them the path looks ahead itself.
    void ask_for(const Unit& unit, int32_t kv_head, int32_t span) {
        if (unit.num_rows > kFewRows && unit.num_seqs == 1) return;
        const int32_t seq = plan_.sequence(unit, 0), span_tile = plan_.first_tile(unit, span);
        path_.ask_for(plan_.table(seq), step_.context_lens[seq], std::max(unit.first_tile, span_tile),
                      std::min(unit.end_tile, span_tile + Path::kSpanTiles), kv_head, unit.num_rows);
    }

    // `ask_for_next` is called before the last tiles are attended to.
    template <class F>
    void run_span(const Unit& unit, const UnitRows& rows, int32_t kv_head, int32_t span_tile, F ask_for_next) {
        const int32_t first_tile = std::max(unit.first_tile, span_tile), span_end = span_tile + Path::kSpanTiles;
        const int32_t end_tile = std::min(unit.end_tile, span_end), shared_end = std::min(unit.shared_end, end_tile);
        const int32_t own_tile = std::max(first_tile, shared_end);
        const auto ask_for_own = [&](int32_t i) {
            if (i == unit.num_seqs || unit.num_seqs == 1) return ask_for_next();
            const int32_t seq = plan_.sequence(unit, i);
            path_.ask_for(plan_.table(seq), step_.context_lens[seq], own_tile, std::min(end_tile, plan_.end_tile(seq)),
                          kv_head, plan_.num_rows(seq));
        };
        ask_for_own(0);
        const int32_t first_seq = plan_.sequence(unit, 0);
        path_.attend(rows, 0, rows.num_rows, plan_.table(first_seq), step_.context_lens[first_seq], kv_head, first_tile,
                     shared_end, span_);
        if (unit.num_seqs == 1) return;
        int32_t row = 0;
        for (int32_t i = 0; i < unit.num_seqs; ++i) {
            const int32_t seq = plan_.sequence(unit, i), end_row = row + plan_.num_rows(seq);
            ask_for_own(i + 1);
            path_.attend(rows, row, end_row, plan_.table(seq), step_.context_lens[seq], kv_head, own_tile,
                         std::min(end_tile, plan_.end_tile(seq)), span_);
            row = end_row;
        }
    }

    // values [num_rows, width], maxima, totals
    void set_aside(const UnitRows& rows, float* partial) const {
        const int64_t num_values = rows.num_rows * span_.width;
        std::copy_n(span_.values, num_values, partial);
        std::copy_n(span_.maximum, rows.num_rows, partial + num_values);
        std::copy_n(span_.total, rows.num_rows, partial + num_values + rows.num_rows);
    }

    void merge_units() {
        worker_.barrier();
        const int32_t num_heads = op_.heads.num_kv_heads;
        for (int64_t i = worker_.take(); i < int64_t{plan_.num_units()} * num_heads; i = worker_.take()) {
            const Unit& unit = plan_.unit(static_cast<int32_t>(i / num_heads));
            if (plan_.is_split(unit)) merge_unit(unit, static_cast<int32_t>(i % num_heads));
        }
    }

    void merge_unit(const Unit& unit, int32_t kv_head) {
        const UnitRows rows(plan_, op_.heads, unit, kv_head);
        const int64_t num_values = rows.num_rows * sums_.width;
        sums_.clear(rows.num_rows);
        for (int32_t span = 0; span < plan_.num_spans(unit); ++span) {
            const float* values = partial(unit, kv_head, span);
            std::copy_n(values + num_values, rows.num_rows, span_.maximum);
            std::copy_n(values + num_values + rows.num_rows, rows.num_rows, span_.total);
            merge(sums_, {span_.maximum, span_.total, values, sums_.width}, rows.num_rows, factor_);
        }
        write(rows);
    }

    void write(const UnitRows& rows) const {
        alignas(64) float in_order[kMaxHeadDim];
        for (int32_t r = 0; r < rows.num_rows; ++r) {
            const float* values = path_.in_order(sums_.values + r * sums_.width, in_order);
            write_out(op_, rows.token[r], rows.head[r], sums_.total[r], values);
        }
    }

    const AttentionOp& op_;
    const StepView& step_;
    Worker& worker_;
    Memory memory_;
    float* const partials_;
    Sums span_, sums_;
    const AttentionPlan plan_;
    int32_t unit_ = 0;        // of the item taken last
    int64_t first_item_ = 0;  // of that unit
    Path path_;
    const typename Path::Factor factor_{};
};

}  // namespace

// Of sums set aside there is room for one long sequence per pair of threads: more need no cutting.
int64_t attention_scratch_bytes(const HeadShape& heads, const AttentionLimits& limits, int32_t num_threads) {
    const int64_t plan = AttentionPlan::memory_bytes(heads, limits.max_tokens, limits.max_seqs);
    const int64_t max_spans = limits.max_context / (kLeastSpanTiles * kTileKeys) + 2;
    const int64_t rows = num_threads == 1 ? 0 : max_spans * std::max(heads.num_qo_heads, 16) * ((num_threads + 1) / 2);
    return num_threads * (thread_bytes(heads) + plan) + rows * partial_floats(heads) * 4;
}

void attention(const AttentionOp& op, const StepView& step, Worker& worker) {
#if defined(__AMX_BF16__)
    if (!op.exact) return Attention<FastPath>(op, step, worker).run();
#elif defined(__AVX512BF16__)
    if (!op.exact) return Attention<VectorPath<PairNumbers>>(op, step, worker).run();
#endif
    Attention<VectorPath<ExactNumbers>>(op, step, worker).run();
}

}  // namespace kvarto::KVARTO_ISA
