// Sampling, row by row: raw logits -> log-probabilities; + bias, penalties -> greedy: arg max; otherwise a draw.
//
// Bounds. A greedy row with nothing else asked reads its summary alone, 12 bytes for 256 logits. A row that is drawn
// reads its logits once, with log-probabilities or top-p twice. A row that is changed is copied before.
#include "ops/sample.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/sample_draw.h"
#include "ops/sample_scratch.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One row to sample.
struct Sampler {
    const StepView& step;
    SampleScratch scratch;
    LogitsRow row;
    int32_t s;

    bool is_changed() const {
        const SamplingView& sampling = step.sampling;
        return sampling.bias_indptr[s] != sampling.bias_indptr[s + 1] ||
               sampling.seen_indptr[s] != sampling.seen_indptr[s + 1];
    }
};

void summarise_row(const LogitsRow& row, bool needs_sum, ChunkSummary* summary) {
    for (int32_t first = 0; first < row.size; first += kChunk)
        summary[first / kChunk] =
            summarise(row.logits + first, std::min(kChunk, row.size - first), first, needs_sum);
}

// The largest logit; NaN where there is one.
float largest_of(const LogitsRow& row) {
    float largest = -std::numeric_limits<float>::infinity();
    for (int32_t i = 0; i < num_chunks(row.size); ++i) {
        const float here = row.chunks[i].largest;
        if (std::isnan(here)) return here;
        largest = std::max(largest, here);
    }
    return largest;
}

void add_bias(const SamplingView& sampling, int32_t s, int32_t size, float* logits) {
    for (int32_t i = sampling.bias_indptr[s]; i < sampling.bias_indptr[s + 1]; ++i) {
        const int32_t id = sampling.bias_ids[i];
        assert(id >= 0 && id < size);
        logits[id] += sampling.bias_values[i];
    }
}

void penalise(const SamplingView& sampling, int32_t s, int32_t size, float* logits) {
    const float repetition = sampling.repetition_penalty[s];
    for (int32_t i = sampling.seen_indptr[s]; i < sampling.seen_indptr[s + 1]; ++i) {
        const int32_t id = sampling.seen_ids[i], count = sampling.seen_output_counts[i];
        assert(id >= 0 && id < size);
        float value = logits[id];
        value = value > 0.0F ? value / repetition : value * repetition;
        value -= static_cast<float>(count) * sampling.frequency_penalty[s];
        if (count > 0) value -= sampling.presence_penalty[s];
        logits[id] = value;
    }
}

// The row with bias and penalties, in the thread's scratch.
LogitsRow changed(const Sampler& sampler) {
    const LogitsRow& row = sampler.row;
    float* logits = sampler.scratch.row;
    std::memcpy(logits, row.logits, static_cast<size_t>(row.size) * sizeof(float));
    add_bias(sampler.step.sampling, sampler.s, row.size, logits);
    penalise(sampler.step.sampling, sampler.s, row.size, logits);
    const LogitsRow made{logits, sampler.scratch.changed_summary, row.size};
    summarise_row(made, false, sampler.scratch.changed_summary);
    return made;
}

Candidates candidates_of(const Sampler& sampler) { return {sampler.scratch.ids, sampler.scratch.values, 0}; }

int32_t drawn_token(const Sampler& sampler) {
    const LogitsRow row = sampler.is_changed() ? changed(sampler) : sampler.row;
    const DrawRules rules(sampler.step.sampling, sampler.s);
    const int32_t likeliest = arg_max(row);
    if (rules.temperature == 0.0F || !std::isfinite(row.logits[likeliest])) return likeliest;  // all may be forbidden
    Candidates candidates = candidates_of(sampler);
    return draw(row, rules, candidates, sampler.scratch.chunk_work);
}

// Of the exponentials of all logits.
double log_total(const LogitsRow& row, float largest) {
    double total = 0.0;
    for (int32_t i = 0; i < num_chunks(row.size); ++i) {
        const ChunkSummary& chunk = row.chunks[i];
        if (!std::isfinite(chunk.largest)) continue;  // a chunk of -inf
        total += static_cast<double>(chunk.sum_exp) * std::exp(static_cast<double>(chunk.largest) - largest);
    }
    return largest + std::log(total);
}

void report_likeliest(const Sampler& sampler, double log_total, int32_t count) {
    Candidates candidates = candidates_of(sampler);
    const LogitsRow& row = sampler.row;
    collect(row, reached_by(row, count, sampler.scratch.chunk_work), candidates);
    keep_largest(candidates, count);
    const ResultView& result = sampler.step.result;
    const int64_t first = int64_t{sampler.s} * result.num_top;
    int32_t* ids = result.top_ids + first;
    std::copy_n(candidates.ids, candidates.count, ids);
    std::sort(ids, ids + candidates.count, [&](int32_t a, int32_t b) {
        return row.logits[a] > row.logits[b] || (row.logits[a] == row.logits[b] && a < b);
    });
    for (int32_t i = 0; i < candidates.count; ++i)
        result.top_logprobs[first + i] = static_cast<float>(row.logits[ids[i]] - log_total);
}

void report(const Sampler& sampler, float largest) {
    const StepView& step = sampler.step;
    const int32_t s = sampler.s, num_logprobs = step.sampling.num_logprobs[s];
    if (num_logprobs < 0) return;
    const double total = log_total(sampler.row, largest);
    const int32_t target = step.sampling.target[s];
    const int32_t token = target >= 0 ? target : step.result.token_ids[s];
    assert(token < sampler.row.size);
    step.result.logprobs[s] = static_cast<float>(sampler.row.logits[token] - total);
    if (num_logprobs > 0) report_likeliest(sampler, total, std::min(num_logprobs, sampler.row.size));
}

// What rows keep that are not finite, and places that nobody asked for.
void clear(const ResultView& result, int32_t s) {
    result.token_ids[s] = 0;
    result.logprobs[s] = kNaN;
    std::fill_n(result.top_ids + int64_t{s} * result.num_top, result.num_top, 0);
    std::fill_n(result.top_logprobs + int64_t{s} * result.num_top, result.num_top, kNaN);
}

void sample_row(const Sampler& sampler) {
    const ResultView& result = sampler.step.result;
    clear(result, sampler.s);
    const float largest = largest_of(sampler.row);
    result.is_finite[sampler.s] = std::isfinite(largest) ? 1 : 0;
    if (!std::isfinite(largest)) return;
    result.token_ids[sampler.s] = drawn_token(sampler);
    report(sampler, largest);
}

}  // namespace

void sample(const SampleOp& op, const StepView& step, Worker& worker) {
    const int32_t size = op.logits.width;
    const SampleScratch scratch(op.scratch + worker.index() * SampleScratch::size_bytes(size), size);
    for (int64_t item = worker.take(); item < step.num_samples; item = worker.take()) {
        const auto s = static_cast<int32_t>(item);
        LogitsRow row{op.logits.f32(s), scratch.summary, size};
        if (op.summaries.data != nullptr)
            row.chunks = reinterpret_cast<const ChunkSummary*>(op.summaries.data + s * op.summaries.row_bytes);
        else
            summarise_row(row, step.sampling.num_logprobs[s] >= 0, scratch.summary);
        sample_row({step, scratch, row, s});
    }
}

}  // namespace kvarto::KVARTO_ISA
