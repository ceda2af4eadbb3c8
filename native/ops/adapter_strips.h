// Pieces of strips as whole vectors of sixteen lanes, wherever pages end. Codes become float32 when they are looked for.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/adapters.h"
#include "ops/adapter_codes.h"
#include "ops/prefetch.h"
#include "simd/vec16.h"

namespace kvarto::KVARTO_ISA {

inline constexpr int32_t kSpan = 512;       // columns of a strip at a time; the smallest page holds them in float32
inline constexpr int32_t kWideSpan = 2048;  // where there is one row, or few
#if defined(__AVX512F__)
inline constexpr int32_t kStripBlock = 8;   // strips side by side
#else
inline constexpr int32_t kStripBlock = 4;
#endif
static_assert(kSpan % kCodeColumns == 0, "a span of codes has whole blocks");

// Columns whose bytes are a line, at least.
constexpr int32_t line_columns(StripType type) { return type == StripType::kF32 ? 16 : 32; }

// Whether its values are numbers in bfloat16.
inline bool stands_for_bf16(StripType type) { return type == StripType::kBF16 || has_codes(type); }

// What a span is of, once it was found.
constexpr StripType span_type(StripType type) { return has_codes(type) ? StripType::kF32 : type; }

template <StripType type> inline F32x16 load_strip(const std::byte* span, int32_t column) {
    static_assert(!has_codes(type), "a span has no codes");
    if constexpr (type == StripType::kF32) return F32x16::load(reinterpret_cast<const float*>(span) + column);
    else if constexpr (type == StripType::kF16) return F32x16::load_f16(reinterpret_cast<const uint16_t*>(span) + column);
    else return F32x16::load_bf16(reinterpret_cast<const uint16_t*>(span) + column);
}

inline F32x16 load_strip(StripType type, const std::byte* span, int32_t column) {
    switch (type) {
        case StripType::kF32: return load_strip<StripType::kF32>(span, column);
        case StripType::kF16: return load_strip<StripType::kF16>(span, column);
        case StripType::kBF16: return load_strip<StripType::kBF16>(span, column);
        case StripType::kQ8:
        case StripType::kQ4: break;
    }
    __builtin_unreachable();
}

// Blocks of codes of a span, which are copied where a page ends among them.
class CodeBlocks {
public:
    CodeBlocks(const Adapter& adapter, const Strips& strips, int32_t strip, int32_t column, int32_t count) {
        const int64_t start = strips.place(strip, column), bytes = strips.bytes(count);
        first_ = adapter.at(start, bytes);
        if (first_ != nullptr) return;
        adapter.copy(start, bytes, copy_);
        first_ = copy_;
    }
    CodeBlocks(const CodeBlocks&) = delete;
    CodeBlocks& operator=(const CodeBlocks&) = delete;
    const std::byte* first() const { return first_; }

private:
    const std::byte* first_;
    std::byte copy_[kSpan / kCodeColumns * block_bytes(StripType::kQ8)];
};

// Columns of a block of strips where they lie, if they do so on one page: at equal distances.
struct StripLines {
    const std::byte* first = nullptr;
    int64_t stride = 0, group_bytes = 0;
    int32_t num = 0;  // of strips; 0: they do not

    StripLines() = default;
    StripLines(const Adapter& adapter, const Strips& strips, int32_t from, int32_t num_strips, int32_t column, int32_t count)
        : first(adapter.at(strips.place(from, column), (num_strips - 1) * strips.strip_bytes() + strips.bytes(count))),
          stride(strips.strip_bytes()), group_bytes(strips.bytes(kGroup)), num(first != nullptr ? num_strips : 0) {}

    // Whether vectors can be loaded from there.
    bool hold_vectors(StripType type, int32_t count) const { return num != 0 && !has_codes(type) && count % 16 == 0; }
    // Calls `ask(where a column lies)` for each strip.
    template <class Ask> void each(int32_t column, Ask ask) const {
        const int64_t offset = column * group_bytes / kGroup;
        for (int32_t s = 0; s < num; ++s) ask(first + s * stride + offset);
    }
};

// What is asked for while a block is multiplied: its own columns some time before their turn, and the first ones of the
// block that comes next. All along, since lines that are asked for in a burst are more than a core has on its way.
class LinesAhead {
public:
    LinesAhead() = default;
    LinesAhead(const StripLines& own, const StripLines& next, int32_t num_columns)
        : own_(own), next_(next), num_columns_(num_columns), distance_(std::min(kSpan, num_columns)) {}
    // When the turn of a column has come: one call per line.
    void ask(int32_t column) const {
        const auto ask_for = [](const std::byte* line) { prefetch_to_second_level(line); };
        const int32_t ahead = column + distance_;
        if (ahead < num_columns_) own_.each(ahead, ask_for);
        else next_.each(ahead - num_columns_, ask_for);
    }

private:
    StripLines own_, next_;
    int32_t num_columns_ = 0, distance_ = 0;
};

// The spans of a block of strips, of `span_type`. What ends within a vector, or lies on two pages, is copied here and
// filled up with zeros; what has codes is decoded to here, to bfloat16 where it is multiplied in pairs.
class StripSpans {
public:
    // Columns [column, column + count) of `num` strips from `first` on; those that there are not are zeros. Of codes,
    // whole blocks.
    void find(const Adapter& adapter, const Strips& strips, int32_t first, int32_t num, int32_t column, int32_t count,
              bool in_pairs = false) {
        for (int32_t s = 0; s < kStripBlock; ++s)
            spans_[static_cast<size_t>(s)] =
                s < num ? span(adapter, strips, first + s, column, count, in_pairs, copies_[s]) : zeros();
    }
    // The same, where they lie.
    void find(const StripLines& lines, int64_t offset) {
        for (int32_t s = 0; s < kStripBlock; ++s)
            spans_[static_cast<size_t>(s)] = s < lines.num ? lines.first + s * lines.stride + offset : zeros();
    }
    const std::byte* operator[](int32_t s) const { return spans_[static_cast<size_t>(s)]; }

private:
    static const std::byte* zeros() {
        alignas(64) static constexpr std::byte kZeros[kWideSpan * sizeof(float)]{};
        return kZeros;
    }
    static const std::byte* span(const Adapter& adapter, const Strips& strips, int32_t strip, int32_t column,
                                 int32_t count, [[maybe_unused]] bool in_pairs, std::byte* copy) {
        if (has_codes(strips.type)) {
            const CodeBlocks blocks(adapter, strips, strip, column, count);
#if defined(__AVX512BF16__)
            if (in_pairs) return decode_bf16(strips.type, blocks.first(), count, copy), copy;
#endif
            decode(strips.type, blocks.first(), count, reinterpret_cast<float*>(copy));
            return copy;
        }
        const int64_t start = strips.place(strip, column), bytes = strips.bytes(count);
        if (count % 16 == 0)
            if (const std::byte* there = adapter.at(start, bytes)) return there;
        adapter.copy(start, bytes, copy);
        std::memset(copy + bytes, 0, static_cast<size_t>(kSpan * int64_t{sizeof(float)} - bytes));
        return copy;
    }

    std::array<const std::byte*, kStripBlock> spans_;
    alignas(64) std::byte copies_[kStripBlock][kSpan * sizeof(float)];
};

}  // namespace kvarto::KVARTO_ISA
