/* What the limiter adds to one allocation and its release, and to a question: nanoseconds per pair, the least of many
 * rounds. Run once with the limiter preloaded and once without. Prints one JSON line. */
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

#include "ways.h"

enum { NUM_ROUNDS = 60, NUM_PAIRS = 20000, NUM_LIVE = 64 };

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* Among other allocations that live, so that the release has to find its record. */
static void pairs(void) {
    CUdeviceptr pointer;
    for (int index = 0; index < NUM_PAIRS; index++) {
        if (cuMemAlloc_v2(&pointer, 4096) != CUDA_SUCCESS) return;
        cuMemFree_v2(pointer);
    }
}

static void questions(void) {
    size_t free_bytes, total_bytes;
    for (int index = 0; index < NUM_PAIRS; index++) cuMemGetInfo_v2(&free_bytes, &total_bytes);
}

static void launches(void) {
    for (int index = 0; index < NUM_PAIRS; index++) cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

static double least(void (*work)(void)) {
    double best = 1e18;
    for (int round = 0; round < NUM_ROUNDS; round++) {
        double start = now_ns();
        work();
        double spent = (now_ns() - start) / NUM_PAIRS;
        if (spent < best) best = spent;
    }
    return best;
}

int main(void) {
    Place place;
    CUdeviceptr live[NUM_LIVE];
    if (cuInit(0) != CUDA_SUCCESS || place_open(&place) != CUDA_SUCCESS) return 1;
    for (int index = 0; index < NUM_LIVE; index++) cuMemAlloc_v2(&live[index], 4096);
    printf("{\"pair_ns\": %.1f, \"info_ns\": %.1f, \"launch_ns\": %.1f}\n", least(pairs), least(questions),
           least(launches));
    return 0;
}
