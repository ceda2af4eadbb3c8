// What one pass works on, as raw pointers into flat arrays that the caller keeps alive. Mirrors kvarto/core/step.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"

namespace kvarto {

// Parameters of the rows to sample; arrays are [num_samples] unless said otherwise. See kvarto/core/step.py.
struct SamplingView {
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const float* repetition_penalty;
    const float* presence_penalty;
    const float* frequency_penalty;
    const int64_t* seed;
    const int32_t* choice;
    const int32_t* position;
    const int32_t* num_logprobs;
    const int32_t* target;
    const int32_t* bias_indptr;  // [num_samples + 1]
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* seen_indptr;  // [num_samples + 1]
    const int32_t* seen_ids;
    const int32_t* seen_output_counts;
};

// Where sampling writes. Mirrors StepResult.
struct ResultView {
    int32_t* token_ids;   // [num_samples]
    float* logprobs;      // [num_samples]
    int32_t num_top;      // k: the largest num_logprobs of the step
    int32_t* top_ids;     // [num_samples, k]
    float* top_logprobs;  // [num_samples, k]
    uint8_t* is_finite;   // [num_samples]
};

struct StepView {
    int32_t num_tokens;
    int32_t num_seqs;
    int32_t num_samples;
    const int32_t* token_ids;     // [num_tokens]
    const int32_t* positions;     // [num_tokens], absolute in their sequence
    const int32_t* cu_seqlens;    // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]: tokens in pages once this step has written its own
    int32_t max_pages;
    const int32_t* page_tables;   // [num_groups, num_seqs, max_pages]
    const int64_t* slot_mapping;  // [num_groups, num_tokens]: page * page_size + offset
    const int32_t* sample_rows;   // [num_samples]
    const int32_t* adapters;        // [num_seqs]: handles, negative for none; null: no sequence has one
    const int32_t* adapter_starts;  // [num_seqs]: first position at which the adapter is active; null where they are
    SamplingView sampling;
    ResultView result;
    // [number of ops]: whether an adapter updates what an op writes in this step. Null: none does. The executor's.
    const uint8_t* updated;

    // Of a buffer in this step.
    int32_t num_rows(const Rows& rows) const { return rows.per_sample ? num_samples : num_tokens; }
    bool is_updated(int32_t op) const { return updated != nullptr && updated[op] != 0; }
};

}  // namespace kvarto
