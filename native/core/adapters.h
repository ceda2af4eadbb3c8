// Adapters whose bytes are in pages, and which rows of a step each is active for. Mirrors kvarto/core/bound_adapter.py.
//
// An adapter is one stream of bytes, cut wherever a page ends: byte b of it lies in page `pages[b / page_bytes]`, at
// `b % page_bytes`. A strip is a row of A, a column of B, or a vector; its bytes are contiguous but where a page ends.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/rows.h"
#include "core/step.h"
#include "core/strip_type.h"

namespace kvarto {

inline constexpr int32_t kMaxAdapters = 4096;  // handles are below it

// Strips of equal width and type, one right after the other in the stream.
struct Strips {
    int64_t start = 0;       // byte of the stream at which the first begins
    int32_t num_strips = 0;  // 0: there are none
    int32_t num_columns = 0;
    StripType type = StripType::kF32;

    // Bytes of so many columns, whole blocks.
    int64_t bytes(int32_t columns) const { return kvarto::strip_bytes(type, columns); }
    int64_t strip_bytes() const { return bytes(num_columns); }
    int64_t end() const { return start + num_strips * strip_bytes(); }
    // Where a column of a strip begins, the first of a block.
    int64_t place(int32_t strip, int32_t column) const { return start + strip * strip_bytes() + bytes(column); }
};

// y[first_row ..] += scaling * (B (A x) + bias), and with a magnitude what DoRA makes of it; see the Python class.
struct AdapterUpdate {
    int32_t op = 0;
    int32_t first_row = 0;
    float scaling = 0;
    Strips a, b, bias, magnitude;
    int32_t first_rank = 0;  // of its sums A x among those of all updates of the op

    int32_t rank() const { return a.num_strips; }
};

// Rows in place of the base's, of an embedding or of the output matrix.
struct AdapterTokens {
    int32_t op = 0;
    Strips rows;
    std::vector<int32_t> token_of_strip;
    std::vector<int32_t> token_ids;  // ascending
    std::vector<int32_t> strips;     // that of each

    // The strip of a token; -1 where the base's row stays.
    int32_t strip_of(int32_t token) const;
};

class Adapter {
public:
    // Pages in the order of the stream; updates in the order of ops, of which there are `num_ops`.
    Adapter(int64_t page_bytes, std::vector<const std::byte*> pages, std::vector<AdapterUpdate> updates,
            std::vector<AdapterTokens> tokens, int32_t num_ops);
    std::span<const AdapterUpdate> updates() const { return updates_; }
    std::span<const AdapterUpdate> updates_of(int64_t op) const {
        const auto first = static_cast<size_t>(first_update_[op]), last = static_cast<size_t>(first_update_[op + 1]);
        return updates().subspan(first, last - first);
    }
    std::span<const AdapterTokens> tokens() const { return tokens_; }
    // The tokens that are replaced for an op; null where none are.
    const AdapterTokens* tokens_of(int64_t op) const;
    size_t num_ops() const { return first_update_.size() - 1; }
    int64_t size_bytes() const { return page_bytes_ * static_cast<int64_t>(pages_.size()); }
    // Bytes [first, first + count) of the stream where they lie; null where a page ends inside.
    const std::byte* at(int64_t first, int64_t count) const {
        const int64_t page = first / page_bytes_, offset = first - page * page_bytes_;
        return offset + count <= page_bytes_ ? pages_[static_cast<size_t>(page)] + offset : nullptr;
    }
    // The same, copied to `out`, over any ends of pages.
    void copy(int64_t first, int64_t count, std::byte* out) const;

private:
    int64_t page_bytes_;
    std::vector<const std::byte*> pages_;
    std::vector<AdapterUpdate> updates_;
    std::vector<AdapterTokens> tokens_;
    std::vector<int32_t> first_update_;  // [num_ops + 1]
};

// Rows of a step that an adapter is active for: [first, first + count) of a list of rows.
struct AdapterSegment {
    const Adapter* adapter;
    int32_t first;
    int32_t count;
};

// Segments and the rows that they name, ascending in each: of buffers with a row per token, or per sample.
struct AdapterRows {
    std::span<const AdapterSegment> segments;
    const int32_t* rows = nullptr;
};

// One op's part of a step.
struct AdapterWork {
    Rows x, out;
    Rows sums;  // A x: a row per row of a segment, as the list of rows has them; a column per rank of the op's updates
    AdapterRows rows;
    int64_t op = 0;
    // What the base's product does not multiply: [out.width] for all rows; or a row of as many each, named by
    // `bias_rows`; or null.
    const float* bias = nullptr;
    const int32_t* bias_rows = nullptr;
    // Of an embedding: A x is a column of A, that of the row's token, and everything is scaled.
    const int32_t* token_ids = nullptr;
    float scale = 1.0F;

    const float* bias_of(int32_t row) const {
        return bias_rows == nullptr ? bias : bias + int64_t{bias_rows[row]} * out.width;
    }
    bool has_tokens() const {
        return std::ranges::any_of(rows.segments, [this](const AdapterSegment& segment) {
            return segment.adapter->tokens_of(op) != nullptr;
        });
    }
};

// All adapters that are bound, and what the step at hand makes of them. Nothing is allocated but when one is bound.
class AdapterTable {
public:
    AdapterTable(int32_t max_tokens, int32_t max_samples, int32_t max_seqs);
    bool is_bound(int32_t handle) const { return adapters_[static_cast<size_t>(handle)] != nullptr; }
    void bind(int32_t handle, std::unique_ptr<const Adapter> adapter);
    void unbind(int32_t handle) { adapters_[static_cast<size_t>(handle)].reset(); }
    // Finds the rows of each adapter that the step names; all are bound. Costs about a nanosecond per row of theirs and
    // per op that one of them updates.
    void prepare(const StepView& step);
    // [num_ops]: whether an adapter that is active in the step updates the op; null where none is active.
    const uint8_t* updated() const { return token_segments_.empty() ? nullptr : updated_.data(); }
    AdapterRows rows(bool per_sample) const {
        return per_sample ? AdapterRows{sample_segments_, sample_rows_.data()}
                          : AdapterRows{token_segments_, token_rows_.data()};
    }

private:
    void find_token_rows(const StepView& step);
    void find_sample_rows(const StepView& step);

    std::array<std::unique_ptr<const Adapter>, kMaxAdapters> adapters_;
    std::vector<int32_t> segment_of_handle_;  // [kMaxAdapters]; -1 between steps
    std::vector<int32_t> segment_of_token_;   // [max_tokens]; -1: none is active
    std::vector<AdapterSegment> token_segments_, sample_segments_;
    std::vector<int32_t> token_rows_, sample_rows_;
    std::vector<uint8_t> updated_;
};

}  // namespace kvarto
