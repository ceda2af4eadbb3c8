// Included before every file of llama.cpp. GCC 12's `_tile_loadconfig` tells the compiler that 8 of the 64 bytes are
// read; the stores to the others are dropped as dead, and the first use of a tile is an illegal instruction.
#pragma once
#ifdef __AMX_TILE__
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)) : "memory")
#endif
