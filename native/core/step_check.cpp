#include "core/step_check.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/adapters.h"

namespace kvarto {

namespace {

void require(bool holds, const char* what, int64_t value, int64_t limit) {
    if (holds) return;
    throw std::invalid_argument(std::string("step: ") + what + " " + std::to_string(value) + ", limit " +
                                std::to_string(limit));
}

// All of `values` in [low, high).
template <class T> void require_range(const T* values, int64_t count, int64_t low, int64_t high, const char* what) {
    if (count == 0) return;
    const auto [least, most] = std::minmax_element(values, values + count);
    require(*least >= low, what, *least, low);
    require(*most < high, what, *most, high - 1);
}

void check_sequences(const StepView& step, const StepBounds& bounds) {
    require(step.cu_seqlens[0] == 0, "cu_seqlens[0]", step.cu_seqlens[0], 0);
    require(step.cu_seqlens[step.num_seqs] == step.num_tokens, "cu_seqlens at its end", step.cu_seqlens[step.num_seqs],
            step.num_tokens);
    for (int32_t seq = 0; seq < step.num_seqs; ++seq) {
        const int32_t length = step.cu_seqlens[seq + 1] - step.cu_seqlens[seq], context = step.context_lens[seq];
        require(length >= 0 && length <= context, "tokens of a sequence", length, context);
        require(context <= bounds.max_positions, "context_lens", context, bounds.max_positions);
        const int64_t room = int64_t{step.max_pages} * bounds.page_size;
        require(context <= room, "tokens beyond a page table", context, room);
    }
}

// A page that nothing is kept of is negative; see NO_PAGE.
void check_pages(const StepView& step, const StepBounds& bounds) {
    for (int32_t group = 0; group < bounds.num_groups; ++group)
        for (int32_t seq = 0; seq < step.num_seqs; ++seq) {
            const int64_t row = int64_t{group} * step.num_seqs + seq;
            const int32_t num_pages = (step.context_lens[seq] + bounds.page_size - 1) / bounds.page_size;
            require_range(step.page_tables + row * step.max_pages, num_pages, -1, bounds.num_pages, "page_tables");
        }
    const int64_t num_slots = int64_t{bounds.num_pages} * bounds.page_size;
    require_range(step.slot_mapping, int64_t{bounds.num_groups} * step.num_tokens, 0, num_slots, "slot_mapping");
}

void check_sampling(const StepView& step, const StepBounds& bounds) {
    const SamplingView& sampling = step.sampling;
    require_range(step.sample_rows, step.num_samples, 0, step.num_tokens, "sample_rows");
    require_range(sampling.target, step.num_samples, -1, bounds.vocab_size, "target");
    require_range(sampling.num_logprobs, step.num_samples, -1, step.result.num_top + 1, "num_logprobs");
    for (const int32_t* indptr : {sampling.bias_indptr, sampling.seen_indptr})
        require(indptr[0] == 0 && std::is_sorted(indptr, indptr + step.num_samples + 1), "rows of indptr", indptr[0], 0);
    require_range(sampling.bias_ids, sampling.bias_indptr[step.num_samples], 0, bounds.vocab_size, "bias_ids");
    require_range(sampling.seen_ids, sampling.seen_indptr[step.num_samples], 0, bounds.vocab_size, "seen_ids");
}

void check_adapters(const StepView& step) {
    if (step.adapters == nullptr) return;
    require_range(step.adapters, step.num_seqs, -1, kMaxAdapters, "adapters");
    require_range(step.adapter_starts, step.num_seqs, 0, int64_t{1} << 31, "adapter_starts");
}

}  // namespace

void check_step(const StepView& step, const StepBounds& bounds) {
    require(step.num_tokens <= bounds.max_tokens, "tokens", step.num_tokens, bounds.max_tokens);
    require(step.num_seqs <= bounds.max_seqs, "sequences", step.num_seqs, bounds.max_seqs);
    require(step.num_samples <= bounds.max_samples, "samples", step.num_samples, bounds.max_samples);
    require_range(step.token_ids, step.num_tokens, 0, bounds.vocab_size, "token_ids");
    require_range(step.positions, step.num_tokens, 0, bounds.max_positions, "positions");
    check_sequences(step, bounds);
    check_pages(step, bounds);
    check_sampling(step, bounds);
    check_adapters(step);
}

}  // namespace kvarto
