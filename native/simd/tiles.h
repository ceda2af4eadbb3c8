// The eight tile registers of AMX, up to 16 rows of 64 bytes each, named by template arguments.
//
// Written as assembly, since some compilers' intrinsics take only literal numbers and let loads of tiles pass stores.
#pragma once

#if defined(__AMX_TILE__)

#include <immintrin.h>

#include <cstdint>

namespace kvarto::KVARTO_ISA {

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};

    void set(int tile, int rows, int bytes) {
        num_rows[tile] = static_cast<uint8_t>(rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

inline void configure_tiles(const TileConfig& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

// Gives the tiles' state up, so that the system need not save it.
inline void release_tiles() { asm volatile("tilerelease"); }

template <int tile> [[gnu::always_inline]] inline void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }

template <int tile> [[gnu::always_inline]] inline void load_tile(const void* rows, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(row_bytes), "i"(tile) : "memory");
}

// The same of rows that only pass: what is used again stays in the first-level cache.
template <int tile> [[gnu::always_inline]] inline void load_passing_tile(const void* rows, int64_t row_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(row_bytes), "i"(tile) : "memory");
}

template <int tile> [[gnu::always_inline]] inline void store_tile(void* rows, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(row_bytes), "i"(tile) : "memory");
}

// sums[m][n] += (sum of a[m][k] · b[k / 2][n][k % 2] over even k) + (the same over odd k), in float32 from bfloat16.
template <int sums, int a, int b> [[gnu::always_inline]] inline void multiply_tiles_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

// sums[m][n] += sum of a[m][k] · b[k / 4][n][k % 4], of signed bytes in int32.
template <int sums, int a, int b> [[gnu::always_inline]] inline void multiply_tiles_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

}  // namespace kvarto::KVARTO_ISA

#endif
