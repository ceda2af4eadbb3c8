// Registers of one, two or four lanes of sixteen bytes: what is done to one lane is done to each. And stores past the
// caches, of registers that lie in one cache line after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace kvarto::KVARTO_ISA {

constexpr int kLaneBytes = 16;
#if defined(__AVX512BW__)
constexpr int kByteLanes = 4;
#elif defined(__AVX2__)
constexpr int kByteLanes = 2;
#else
constexpr int kByteLanes = 1;
#endif
constexpr int kRegisterBytes = kByteLanes * kLaneBytes;

namespace detail {

template <class Item> struct RegisterOf {
    typedef Item type __attribute__((vector_size(kRegisterBytes)));
};

}  // namespace detail

template <class Item> using Register = typename detail::RegisterOf<Item>::type;

template <class Item> Register<Item> load_register(const std::byte* in) {
    Register<Item> out;
    std::memcpy(&out, in, sizeof out);
    return out;
}

template <class Vector> void store_register(std::byte* out, Vector values) { std::memcpy(out, &values, sizeof values); }

// Lane i lies `i * stride` bytes behind the first.
template <class Item> Register<Item> load_lanes(const std::byte* in, [[maybe_unused]] int64_t stride) {
#if defined(__AVX2__)
    const auto lane = [=](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i * stride)); };
#endif
#if defined(__AVX512BW__)
    const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(lane(0)), lane(1), 1);
    return reinterpret_cast<Register<Item>>(_mm512_inserti32x4(_mm512_inserti32x4(two, lane(2), 2), lane(3), 3));
#elif defined(__AVX2__)
    return reinterpret_cast<Register<Item>>(_mm256_inserti128_si256(_mm256_castsi128_si256(lane(0)), lane(1), 1));
#else
    return load_register<Item>(in);
#endif
}

// Past the caches, where the processor can. `out` is aligned to a register; others see it after a fence.
template <class Vector> void stream_register(std::byte* out, Vector values) {
#if defined(__AVX512BW__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), reinterpret_cast<__m512i>(values));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out), reinterpret_cast<__m256i>(values));
#elif defined(__SSE2__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(out), reinterpret_cast<__m128i>(values));
#else
    store_register(out, values);
#endif
}

namespace detail {

// Of each lane, items of a half of `a` and of that of `b` in turns.
template <bool kHigh, class Vector, size_t... kItem>
Vector interleave(Vector a, Vector b, std::index_sequence<kItem...>) {
    constexpr size_t kItems = sizeof...(kItem), kOfLane = kItems / kByteLanes, kFirst = kHigh ? kOfLane / 2 : 0;
    return __builtin_shufflevector(
        a, b, (kItem / kOfLane * kOfLane + kFirst + kItem % kOfLane / 2 + kItem % 2 * kItems)...);
}

}  // namespace detail

// The low halves of all lanes to `a`, the high ones to `b`.
template <class Vector> void interleave(Vector& a, Vector& b) {
    constexpr auto kItems = std::make_index_sequence<sizeof(Vector) / sizeof(a[0])>();
    const Vector low = detail::interleave<false>(a, b, kItems);
    b = detail::interleave<true>(a, b, kItems);
    a = low;
}

}  // namespace kvarto::KVARTO_ISA
