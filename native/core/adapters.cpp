#include "core/adapters.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

namespace kvarto {

Adapter::Adapter(int64_t page_bytes, std::vector<const std::byte*> pages, std::vector<AdapterUpdate> updates,
                 std::vector<AdapterTokens> tokens, int32_t num_ops)
    : page_bytes_(page_bytes),
      pages_(std::move(pages)),
      updates_(std::move(updates)),
      tokens_(std::move(tokens)),
      first_update_(static_cast<size_t>(num_ops) + 1) {
    for (const AdapterUpdate& update : updates_) ++first_update_[static_cast<size_t>(update.op) + 1];
    for (size_t op = 1; op < first_update_.size(); ++op) first_update_[op] += first_update_[op - 1];
    for (size_t i = 1; i < updates_.size(); ++i)
        if (updates_[i].op == updates_[i - 1].op)
            updates_[i].first_rank = updates_[i - 1].first_rank + updates_[i - 1].rank();
}

int32_t AdapterTokens::strip_of(int32_t token) const {
    const auto found = std::ranges::lower_bound(token_ids, token);
    if (found == token_ids.end() || *found != token) return -1;
    return strips[static_cast<size_t>(found - token_ids.begin())];
}

const AdapterTokens* Adapter::tokens_of(int64_t op) const {
    for (const AdapterTokens& tokens : tokens_)
        if (tokens.op == op) return &tokens;
    return nullptr;
}

void Adapter::copy(int64_t first, int64_t count, std::byte* out) const {
    while (count > 0) {
        const int64_t page = first / page_bytes_, offset = first - page * page_bytes_;
        const int64_t here = std::min(count, page_bytes_ - offset);
        std::memcpy(out, pages_[static_cast<size_t>(page)] + offset, static_cast<size_t>(here));
        first += here, out += here, count -= here;
    }
}

AdapterTable::AdapterTable(int32_t max_tokens, int32_t max_samples, int32_t max_seqs)
    : segment_of_handle_(kMaxAdapters, -1),
      segment_of_token_(static_cast<size_t>(max_tokens)),
      token_rows_(static_cast<size_t>(max_tokens)),
      sample_rows_(static_cast<size_t>(max_samples)) {
    token_segments_.reserve(static_cast<size_t>(max_seqs));
    sample_segments_.reserve(static_cast<size_t>(max_seqs));
}

void AdapterTable::bind(int32_t handle, std::unique_ptr<const Adapter> adapter) {
    updated_.resize(adapter->num_ops());  // the program's, whichever adapter it is
    adapters_[static_cast<size_t>(handle)] = std::move(adapter);
}

void AdapterTable::prepare(const StepView& step) {
    token_segments_.clear();
    sample_segments_.clear();
    if (step.adapters == nullptr) return;
    find_token_rows(step);
    if (token_segments_.empty()) return;
    find_sample_rows(step);
    // Threads take items in this order, and end together if the last ones are small.
    for (std::vector<AdapterSegment>* segments : {&token_segments_, &sample_segments_})
        std::ranges::sort(*segments, std::greater{}, [](const AdapterSegment& of) { return of.adapter->size_bytes(); });
    std::ranges::fill(updated_, uint8_t{0});
    for (const AdapterSegment& segment : token_segments_) {
        for (const AdapterUpdate& update : segment.adapter->updates()) updated_[static_cast<size_t>(update.op)] = 1;
        for (const AdapterTokens& tokens : segment.adapter->tokens()) updated_[static_cast<size_t>(tokens.op)] = 1;
    }
}

namespace {

// Turns counts of rows into places in the list of rows; counts begin anew.
void place(std::vector<AdapterSegment>& segments) {
    int32_t first = 0;
    for (AdapterSegment& segment : segments) {
        segment.first = first;
        first += std::exchange(segment.count, 0);
    }
}

void append(AdapterSegment& segment, std::vector<int32_t>& rows, int32_t row) {
    rows[static_cast<size_t>(segment.first + segment.count++)] = row;
}

}  // namespace

void AdapterTable::find_token_rows(const StepView& step) {
    std::fill_n(segment_of_token_.begin(), step.num_tokens, -1);
    for (int32_t seq = 0; seq < step.num_seqs; ++seq) {
        const int32_t handle = step.adapters[seq], begin = step.cu_seqlens[seq], end = step.cu_seqlens[seq + 1];
        if (handle < 0 || begin == end) continue;
        const int64_t before = std::max<int64_t>(int64_t{step.adapter_starts[seq]} - step.positions[begin], 0);
        if (before >= end - begin) continue;
        int32_t& place = segment_of_handle_[static_cast<size_t>(handle)];
        if (place < 0) {
            place = static_cast<int32_t>(token_segments_.size());
            token_segments_.push_back({adapters_[static_cast<size_t>(handle)].get(), 0, 0});
        }
        const auto first = begin + static_cast<int32_t>(before);
        token_segments_[static_cast<size_t>(place)].count += end - first;
        std::fill(segment_of_token_.begin() + first, segment_of_token_.begin() + end, place);
    }
    for (int32_t seq = 0; seq < step.num_seqs; ++seq)
        if (step.adapters[seq] >= 0) segment_of_handle_[static_cast<size_t>(step.adapters[seq])] = -1;
    place(token_segments_);
    for (int32_t row = 0; row < step.num_tokens; ++row) {
        const int32_t segment = segment_of_token_[static_cast<size_t>(row)];
        if (segment >= 0) append(token_segments_[static_cast<size_t>(segment)], token_rows_, row);
    }
}

void AdapterTable::find_sample_rows(const StepView& step) {
    for (const AdapterSegment& segment : token_segments_) sample_segments_.push_back({segment.adapter, 0, 0});
    const auto segment_of = [&](int32_t sample) {
        return segment_of_token_[static_cast<size_t>(step.sample_rows[sample])];
    };
    for (int32_t sample = 0; sample < step.num_samples; ++sample)
        if (segment_of(sample) >= 0) ++sample_segments_[static_cast<size_t>(segment_of(sample))].count;
    place(sample_segments_);
    for (int32_t sample = 0; sample < step.num_samples; ++sample)
        if (segment_of(sample) >= 0)
            append(sample_segments_[static_cast<size_t>(segment_of(sample))], sample_rows_, sample);
}

}  // namespace kvarto
