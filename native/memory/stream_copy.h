// Copies to where nobody looks soon: past the caches, where the processor can.
//
// An ordinary store first reads the line that it overwrites, and pushes out of the cache what others still need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvarto {

// When it goes, stores past the caches have been made: others see them after whatever hands them the bytes.
struct StreamFence {
    StreamFence() = default;
    StreamFence(const StreamFence&) = delete;
    StreamFence& operator=(const StreamFence&) = delete;
    ~StreamFence() {
#if defined(__SSE2__)
        _mm_sfence();
#endif
    }
};

// With a fence at its end.
inline void stream_copy(std::byte* out, const std::byte* in, size_t count) {
#if defined(__SSE2__)
    constexpr size_t kLine = 64, kAhead = 2048;  // bytes: read ahead as far as one memory access takes
    const size_t head = -reinterpret_cast<uintptr_t>(out) % kLine;
    if (count >= head + kLine) {
        std::memcpy(out, in, head);
        out += head, in += head, count -= head;
        const StreamFence fence;
        for (; count >= kLine; out += kLine, in += kLine, count -= kLine) {
            if (count > kAhead) __builtin_prefetch(in + kAhead, 0, 2);
            for (size_t part = 0; part < kLine; part += sizeof(__m128i)) {
                const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + part));
                _mm_stream_si128(reinterpret_cast<__m128i*>(out + part), value);
            }
        }
    }
#endif
    std::memcpy(out, in, count);
}

}  // namespace kvarto
