// Who computes what in one attention op: rows of queries in units, units in items that threads take.
//
// A row is one query head of one token. The rows that share a kv head are, for a sequence, (token, head in its group).
//
//   unit    rows that read the same pages: some of one sequence, or all of several that share their first tiles
//   tile    64 keys by absolute position;  span = the tiles that add up alone, `span_tiles` of them
//   item    one kv head of a unit, or all of them one after the other: all spans, or a stretch of them, whose sums are
//           then merged in order
//
// No bit of the result depends on how rows, spans and threads come together: a row's arithmetic is its own. So all of
// this is free to follow the machine. Every worker makes the same plan by itself, which is cheaper than to wait for it.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/ops.h"
#include "core/step.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kTileKeys = 64;
inline constexpr int32_t kUnitRows = 64;     // at most, in a unit
inline constexpr int32_t kLeastUnitRows = 16;
inline constexpr int32_t kFewRows = 16;      // up to so many are bound by reading keys and values

struct Unit {
    int32_t first_seq, num_seqs;   // places in AttentionPlan::order
    int32_t first_row, num_rows;   // of its only sequence; of several, all rows of each
    int32_t first_tile, end_tile;  // what any of its rows sees
    int32_t shared_end;            // the tiles before lie in the same pages for all its sequences
    int32_t spans_per_item;        // fewer than all: sums are set aside
    int32_t first_partial;         // where, in rows
    int32_t heads_per_item;
};

// Spans of a unit are counted from the one that holds its first tile.
struct SpanRange {
    int32_t first, end;
};

struct Item {
    int32_t first_head, end_head;
    SpanRange spans;
};

class AttentionPlan {
public:
    // `memory`: `memory_bytes` of this op and step, 64-byte aligned.
    AttentionPlan(const AttentionOp& op, const StepView& step, int32_t span_tiles, int32_t share_tiles,
                  int32_t num_threads, int64_t num_partial_rows, std::byte* memory)
        : op_(op),
          step_(step),
          span_tiles_(span_tiles),
          share_tiles_(share_tiles),
          group_size_(op.heads.num_qo_heads / op.heads.num_kv_heads),
          num_threads_(num_threads),
          order_(reinterpret_cast<int32_t*>(memory)),
          units_(reinterpret_cast<Unit*>(memory + align_up(4 * int64_t{step.num_seqs}, 64))) {
        const int64_t rows_per_item = int64_t{step.num_tokens} * op.heads.num_qo_heads / (4 * num_threads);
        unit_rows_ = static_cast<int32_t>(std::clamp<int64_t>(rows_per_item / kLeastUnitRows * kLeastUnitRows,
                                                              kLeastUnitRows, kUnitRows));
        make_order();
        make_units();
        split_units(num_threads, num_partial_rows);
        count_items(num_threads);
    }

    // At most, for steps of so many tokens and sequences.
    static int64_t memory_bytes(const HeadShape& heads, int64_t num_tokens, int64_t num_seqs) {
        const int64_t group_size = heads.num_qo_heads / heads.num_kv_heads;
        const int64_t num_units = num_seqs + num_tokens * group_size / kLeastUnitRows;
        return align_up(4 * num_seqs, 64) + align_up(num_units * static_cast<int64_t>(sizeof(Unit)), 64);
    }

    int32_t num_units() const { return num_units_; }
    int64_t num_items() const { return num_items_; }  // of all units
    bool has_partials() const { return has_partials_; }
    const Unit& unit(int32_t i) const { return units_[i]; }
    int32_t sequence(const Unit& unit, int32_t i) const { return order_[unit.first_seq + i]; }

    const int32_t* table(int32_t seq) const {
        return step_.page_tables + (int64_t{op_.group} * step_.num_seqs + seq) * step_.max_pages;
    }
    int32_t num_rows(int32_t seq) const {
        return (step_.cu_seqlens[seq + 1] - step_.cu_seqlens[seq]) * group_size_;
    }
    int32_t token(int32_t seq, int32_t row) const { return step_.cu_seqlens[seq] + row / group_size_; }
    int32_t position(int32_t seq, int32_t row) const { return step_.positions[token(seq, row)]; }
    // Behind all tiles that any row of the sequence sees.
    int32_t end_tile(int32_t seq) const { return position(seq, num_rows(seq) - 1) / kTileKeys + 1; }
    // The first key that a query at `position` sees.
    int32_t first_key(int32_t position) const { return op_.window == 0 ? 0 : std::max(0, position - op_.window + 1); }

    int32_t num_spans(const Unit& unit) const {
        return (unit.end_tile - 1) / span_tiles_ - unit.first_tile / span_tiles_ + 1;
    }
    bool is_split(const Unit& unit) const { return unit.spans_per_item < num_spans(unit); }
    int32_t num_items(const Unit& unit) const {
        return (num_spans(unit) + unit.spans_per_item - 1) / unit.spans_per_item * (num_heads() / unit.heads_per_item);
    }
    // Heads of a stretch of spans are neighbours.
    Item item(const Unit& unit, int32_t index) const {
        const int32_t parts = num_heads() / unit.heads_per_item;
        const int32_t head = index % parts * unit.heads_per_item, span = index / parts * unit.spans_per_item;
        return {head, head + unit.heads_per_item, {span, std::min(span + unit.spans_per_item, num_spans(unit))}};
    }
    int32_t num_heads() const { return op_.heads.num_kv_heads; }
    int32_t first_tile(const Unit& unit, int32_t span) const {
        return (unit.first_tile / span_tiles_ + span) * span_tiles_;
    }

private:
    // Sequences that begin with the same pages become neighbours, those with the longest common part nearest.
    void make_order() {
        for (int32_t i = 0; i < step_.num_seqs; ++i) order_[i] = i;
        std::sort(order_, order_ + step_.num_seqs, [this](int32_t a, int32_t b) {
            const int32_t first_a = table(a)[0], first_b = table(b)[0];
            if (first_a != first_b) return first_a < first_b;
            const int order = std::memcmp(table(a), table(b), static_cast<size_t>(step_.max_pages) * 4);
            return order != 0 ? order < 0 : a < b;
        });
    }

    void make_units() {
        for (int32_t i = 0; i < step_.num_seqs; ++i) {
            const int32_t seq = order_[i], rows = num_rows(seq);
            if (i == 0 || table(seq)[0] != table(order_[i - 1])[0]) shared_rows_ = rows_together(i);
            if (rows == 0 || join(i)) continue;
            for (int32_t first = 0; first < rows; first += unit_rows_)
                units_[num_units_++] = unit_of(i, first, std::min(unit_rows_, rows - first));
        }
        std::sort(units_, units_ + num_units_, [](const Unit& a, const Unit& b) {
            const int64_t cost_a = cost(a), cost_b = cost(b);
            if (cost_a != cost_b) return cost_a > cost_b;
            return a.first_seq != b.first_seq ? a.first_seq < b.first_seq : a.first_row < b.first_row;
        });
    }

    Unit unit_of(int32_t place, int32_t first_row, int32_t rows) const {
        const int32_t seq = order_[place];
        const int32_t first_tile = first_key(position(seq, first_row)) / kTileKeys;
        const int32_t end_tile = position(seq, first_row + rows - 1) / kTileKeys + 1;
        return {place, 1, first_row, rows, first_tile, end_tile, end_tile, 0, 0, 1};
    }

    // Rows of a unit, at most, of the sequences from `place` on that begin with the same page: so many blocks of sixteen
    // that the thread with most to do has least.
    int32_t rows_together(int32_t place) const {
        const int32_t first_page = table(order_[place])[0];
        int64_t rows = 0;
        for (; place < step_.num_seqs && table(order_[place])[0] == first_page; ++place)
            if (num_rows(order_[place]) <= kUnitRows) rows += num_rows(order_[place]);
        int32_t best = kLeastUnitRows;
        const auto time = [&](int32_t most) {
            const int64_t items = (rows + most - 1) / most * num_heads();
            return (items + num_threads_ - 1) / num_threads_ * tile_cost(most);
        };
        for (int32_t most = 2 * kLeastUnitRows; most <= kUnitRows; most += kLeastUnitRows)
            if (time(most) < time(best)) best = most;
        return best;
    }

    // Adds the sequence to the last unit where they share enough.
    bool join(int32_t place) {
        if (num_units_ == 0) return false;
        Unit& last = units_[num_units_ - 1];
        const int32_t seq = order_[place], before = order_[place - 1], rows = num_rows(seq);
        if (last.first_seq + last.num_seqs != place || last.num_rows + rows > shared_rows_) return false;
        if (last.num_seqs == 1 && last.num_rows != num_rows(before)) return false;  // a piece of a sequence
        const Unit own = unit_of(place, 0, rows);
        if (last.first_tile != 0 || own.first_tile != 0) return false;
        const int32_t shared = std::min(last.num_seqs == 1 ? INT32_MAX : last.shared_end, shared_tiles(before, seq));
        if (shared == 0 || (last.num_seqs > 1 && 2 * shared < last.shared_end)) return false;
        last = {last.first_seq, last.num_seqs + 1, 0, last.num_rows + rows, 0,
                std::max(last.end_tile, own.end_tile), shared, 0, 0, 1};
        return true;
    }

    // Whole tiles that both sequences have in the same pages, a multiple of `share_tiles`.
    int32_t shared_tiles(int32_t a, int32_t b) const {
        const int32_t *pages_a = table(a), *pages_b = table(b);
        int32_t num_pages = 0;
        while (num_pages < step_.max_pages && pages_a[num_pages] == pages_b[num_pages] && pages_a[num_pages] >= 0)
            ++num_pages;
        const int64_t tokens = std::min<int64_t>(int64_t{num_pages} * op_.pages.page_size,
                                                 std::min(step_.context_lens[a], step_.context_lens[b]));
        return static_cast<int32_t>(tokens / kTileKeys) / share_tiles_ * share_tiles_;
    }

    // Reading a tile costs about as much as sixteen rows that meet it.
    static int64_t tile_cost(int32_t num_rows) { return 16 + num_rows; }
    static int64_t cost(const Unit& unit) { return int64_t{unit.end_tile - unit.first_tile} * tile_cost(unit.num_rows); }

    // Few rows take all heads of a stretch, which lie side by side in a page: what the machine fetches ahead is used.
    int32_t heads_together(const Unit& unit) const { return unit.num_rows <= kFewRows ? num_heads() : 1; }

    // Cuts what would keep one thread busy when the others are done, as far as there is room for its sums.
    void split_units(int32_t num_threads, int64_t num_partial_rows) {
        int64_t total = 0, partial_rows = 0;
        for (int32_t i = 0; i < num_units_; ++i) total += cost(units_[i]) * num_heads();
        for (int32_t i = 0; i < num_units_; ++i) {
            Unit& unit = units_[i];
            const int32_t spans = num_spans(unit);
            const int64_t rows = int64_t{spans} * unit.num_rows * num_heads(), work = cost(unit) * heads_together(unit);
            unit.spans_per_item = spans;
            if (num_threads == 1 || work * 4 * num_threads <= total || partial_rows + rows > num_partial_rows) continue;
            const auto aim = static_cast<int32_t>(total * spans / (8 * num_threads * work));
            unit.spans_per_item = std::clamp(aim, 1, spans);
            if (!is_split(unit)) continue;
            unit.first_partial = static_cast<int32_t>(partial_rows);
            partial_rows += rows;
            has_partials_ = true;
        }
    }

    // Heads go apart where there would be too few items for all threads.
    void count_items(int32_t num_threads) {
        for (int32_t i = 0; i < num_units_; ++i) {
            units_[i].heads_per_item = heads_together(units_[i]);
            num_items_ += num_items(units_[i]);
        }
        if (num_items_ >= 4 * num_threads || num_threads == 1) return;
        num_items_ = 0;
        for (int32_t i = 0; i < num_units_; ++i) {
            units_[i].heads_per_item = 1;
            num_items_ += num_items(units_[i]);
        }
    }

    const AttentionOp& op_;
    const StepView& step_;
    const int32_t span_tiles_, share_tiles_, group_size_, num_threads_;
    int32_t unit_rows_ = kUnitRows, shared_rows_ = kUnitRows, num_units_ = 0;
    int64_t num_items_ = 0;
    bool has_partials_ = false;
    int32_t* order_;
    Unit* units_;
};

}  // namespace kvarto::KVARTO_ISA
