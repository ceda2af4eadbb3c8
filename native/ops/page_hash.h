// POLYVAL of each of some pages, at a secret point: a keyed hash that is almost universal.
//
//   of blocks X1 … Xn, 16 bytes each:  X1 h^n + X2 h^(n-1) + … + Xn h  =  POLYVAL(h, X1 … Xn), RFC 8452, section 3
//
// in the field and with the products of simd/polyval.h. Two different pages of n blocks differ by a polynomial of degree
// at most n without a constant, which is zero at no more than n points: for a point that nobody knew when the pages were
// made, their hashes are equal with a probability of at most n / 2^128. Whoever sees hashes could find the point.
//
// Sets without a carry-less multiplication have no such kernel: `kHashPages` is null.
#pragma once

#include "core/kernels.h"

namespace kvarto::KVARTO_ISA {

#if defined(__PCLMUL__)
// `page_bytes` is a positive multiple of kHashedBytes; `point` and each hash have kPageHashBytes.
void hash_pages(const std::byte* point, const std::byte* region, std::span<const int32_t> pages, int64_t page_bytes,
                std::byte* hashes);
inline constexpr HashPages kHashPages = &hash_pages;
#else
inline constexpr HashPages kHashPages = nullptr;
#endif

}  // namespace kvarto::KVARTO_ISA
