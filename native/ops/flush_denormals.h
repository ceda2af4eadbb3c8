// Denormal numbers as matrix tiles see them.
#pragma once

#if defined(__AVX512F__)

#include <immintrin.h>

#include <cstdint>

namespace kvarto::KVARTO_ISA {

// Denormal numbers are 0 while it lives, as they are to tiles.
class FlushDenormals {
public:
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040U); }
    ~FlushDenormals() { _mm_setcsr(before_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

private:
    const uint32_t before_;
};

}  // namespace kvarto::KVARTO_ISA

#endif
