// How fast can memory be read? Each thread adds up its share of a buffer, again and again, and touches nothing else.
//
//     cc -O3 -march=native -pthread read_bandwidth.c && ./a.out BYTES THREADS SECONDS
//
// Prints GB/s. Eight independent sums hide the latency of an addition, so that only the loads are in the way; the
// threads meet before every pass, as the threads of an engine do between two products.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { LANES = 8, WORDS_PER_LANE = 8 };

static pthread_barrier_t barrier;
static volatile int is_over;
static volatile uint64_t sink;

typedef struct {
    const uint64_t *words;
    size_t num_words;
} Share;

typedef uint64_t Vector __attribute__((vector_size(WORDS_PER_LANE * sizeof(uint64_t))));

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint64_t add_up(const Share *share) {
    Vector sums[LANES] = {0};
    const Vector *vectors = (const Vector *)share->words;
    size_t num_rounds = share->num_words / (LANES * WORDS_PER_LANE);
    for (size_t round = 0; round < num_rounds; round++)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += vectors[round * LANES + lane];
    uint64_t total = 0;
    for (int lane = 0; lane < LANES; lane++)
        for (int word = 0; word < WORDS_PER_LANE; word++)
            total += sums[lane][word];
    return total;
}

static void *work(void *argument) {
    for (;;) {
        pthread_barrier_wait(&barrier);
        if (is_over)
            return NULL;
        sink += add_up(argument);
        pthread_barrier_wait(&barrier);
    }
}

static double read_for(double duration_s, size_t num_bytes) {
    double start_s = now_s();
    double num_passes = 0;
    do {
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
        num_passes++;
    } while (now_s() - start_s < duration_s);
    return num_passes * (double)num_bytes / (now_s() - start_s);
}

// GB/s of so many threads over a buffer, which holds something. As a library, for whoever has the bytes in question.
double read_rate(const char *buffer, size_t num_bytes, int num_threads, double duration_s) {
    size_t block = LANES * WORDS_PER_LANE * sizeof(uint64_t);
    size_t share_bytes = num_bytes / (size_t)num_threads / block * block;
    if (num_threads < 1 || share_bytes == 0)
        return 0;
    num_bytes = share_bytes * (size_t)num_threads;
    is_over = 0;
    pthread_barrier_init(&barrier, NULL, (unsigned)num_threads + 1);
    pthread_t *threads = calloc((size_t)num_threads, sizeof *threads);
    Share *shares = calloc((size_t)num_threads, sizeof *shares);
    for (int index = 0; index < num_threads; index++) {
        shares[index] = (Share){(const uint64_t *)(buffer + (size_t)index * share_bytes), share_bytes / sizeof(uint64_t)};
        pthread_create(&threads[index], NULL, work, &shares[index]);
    }
    read_for(0.1 * duration_s, num_bytes);  // warms up
    double rate = read_for(duration_s, num_bytes) * 1e-9;
    is_over = 1;
    pthread_barrier_wait(&barrier);
    for (int index = 0; index < num_threads; index++)
        pthread_join(threads[index], NULL);
    pthread_barrier_destroy(&barrier);
    free(threads);
    free(shares);
    return rate;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s BYTES THREADS SECONDS\n", argv[0]);
        return 2;
    }
    size_t num_bytes = strtoull(argv[1], NULL, 10);
    char *buffer = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED)
        return 1;
    madvise(buffer, num_bytes, MADV_HUGEPAGE);
    memset(buffer, 1, num_bytes);
    printf("%.3f\n", read_rate(buffer, num_bytes, atoi(argv[2]), atof(argv[3])));
    return 0;
}
