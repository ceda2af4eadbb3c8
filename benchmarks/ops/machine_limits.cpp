// What this machine can do at best, measured by loops that do nothing else. Built and called by
// benchmarks/ops/linear.py.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

double seconds_of(int num_threads, void (*work)(int, int, const void*, int64_t), const void* data, int64_t count) {
    std::vector<std::thread> threads;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < num_threads; ++i) threads.emplace_back(work, i, num_threads, data, count);
    for (auto& thread : threads) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A thread's share of the bytes, by 256 at a time.
void read(int index, int num_threads, const void* data, int64_t size_bytes) {
    const int64_t share = size_bytes / num_threads / 256 * 256;
    const char* p = static_cast<const char*>(data) + index * share;
    __m256i sums[8] = {};
    for (int64_t i = 0; i < share; i += 256)
        for (int j = 0; j < 8; ++j)
            sums[j] = _mm256_xor_si256(sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
    for (__m256i& sum : sums) asm volatile("" ::"x"(sum));
}

#if defined(__AVX512VNNI__)

// A row's group of 32 columns by 16 weights: eight products, and what scales the sum. 512 multiply-adds.
void int8_group(int, int, const void*, int64_t count) {
    asm volatile(".irp r,8,9,10,11,30,31\nvpxord %%zmm\\r,%%zmm\\r,%%zmm\\r\n.endr" ::
                     : "xmm8", "xmm9", "xmm10", "xmm11", "xmm30", "xmm31");
    for (int64_t i = 0; i < count / 512; i += 4) {
#define KVARTO_GROUP(sum, total)                                                                           \
    "vpxord %%zmm" sum ",%%zmm" sum ",%%zmm" sum "\n.rept 8\nvpdpbusd %%zmm30,%%zmm31,%%zmm" sum "\n.endr\n" \
    "vcvtdq2ps %%zmm" sum ",%%zmm" sum "\nvmulps %%zmm30,%%zmm31,%%zmm29\nvfmadd231ps %%zmm" sum               \
    ",%%zmm29,%%zmm" total "\nvfmadd231ps %%zmm30,%%zmm31,%%zmm" total "\n"
        asm volatile(KVARTO_GROUP("0", "8") KVARTO_GROUP("1", "9") KVARTO_GROUP("2", "10") KVARTO_GROUP("3", "11")::
                         : "xmm0", "xmm1", "xmm2", "xmm3", "xmm8", "xmm9", "xmm10", "xmm11", "xmm29");
    }
}

#else

// The same with vpmaddubsw, for four bits: 8 lanes at a time.
void int8_group(int, int, const void*, int64_t count) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i codes = _mm256_set1_epi8(3);
    __m256 totals[2] = {}, scale = _mm256_set1_ps(1e-6F);
    for (int64_t i = 0; i < count / 512; ++i)
        for (auto& total : totals) {
            __m256i sum = _mm256_setzero_si256();
            for (int j = 0; j < 8; ++j) {
                asm volatile("" : "+x"(codes));
                sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, codes));
            }
            const __m256 product = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, ones));
            total = _mm256_fmadd_ps(product, _mm256_mul_ps(scale, scale), _mm256_fmadd_ps(scale, scale, total));
        }
    for (__m256& total : totals) asm volatile("" ::"x"(total));
}

#endif

#if defined(__AMX_BF16__)

// A tile product: 16 x 16 x 32 multiply-adds.
void bf16_tiles(int, int, const void*, int64_t count) {
    struct alignas(64) {
        uint8_t palette = 1, reserved[15] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" ::"m"(config));
    for (int64_t i = 0; i < count / (4 * 8192); ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

#endif

// Fused multiply-adds in float32, enough of them at once to hide their latency. On zeros: what the registers happen to
// hold may be tiny numbers, which take the processor many times as long.
void f32_lanes(int, int, const void*, int64_t count) {
#if defined(__AVX512F__)
    asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,30,31\nvpxord %%zmm\\r,%%zmm\\r,%%zmm\\r\n.endr" ::
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                       "xmm12", "xmm13", "xmm14", "xmm15", "xmm30", "xmm31");
    for (int64_t i = 0; i < count / (16 * 16); ++i)
        asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\nvfmadd231ps %%zmm30,%%zmm31,%%zmm\\r\n.endr" ::
                         : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                           "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
#else
    asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10,11,14,15\nvpxor %%ymm\\r,%%ymm\\r,%%ymm\\r\n.endr" ::
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                       "xmm14", "xmm15");
    for (int64_t i = 0; i < count / (12 * 8); ++i)
        asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10,11\nvfmadd231ps %%ymm14,%%ymm15,%%ymm\\r\n.endr" ::
                         : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                           "xmm11");
#endif
}

}  // namespace

extern "C" {

double read_seconds(const void* data, int64_t size_bytes, int num_threads) {
    return seconds_of(num_threads, read, data, size_bytes);
}

// Each thread does `count` multiply-adds.
double int8_seconds(int64_t count, int num_threads) { return seconds_of(num_threads, int8_group, nullptr, count); }

double f32_seconds(int64_t count, int num_threads) { return seconds_of(num_threads, f32_lanes, nullptr, count); }

// 0 where there are no tiles.
double bf16_seconds([[maybe_unused]] int64_t count, [[maybe_unused]] int num_threads) {
#if defined(__AMX_BF16__)
    constexpr long kAskForFeature = 0x1023, kTileData = 18;
    if (syscall(SYS_arch_prctl, kAskForFeature, kTileData) == 0)
        return seconds_of(num_threads, bf16_tiles, nullptr, count);
#endif
    return 0;
}
}
