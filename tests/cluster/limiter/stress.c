/* Many processes of many threads that allocate in every way under one limit, while some are killed at random moments.
 *
 *     stress PROCESSES THREADS SECONDS SEED [PAUSE_US]
 *
 * The parent is one more process under the limit. It kills, starts anew, and times how long the killed process took to
 * die, which is the kernel's doing, and from then until its account is empty, which is the limiter's. Each child runs
 * this program again, so that it starts as a program does. Prints one JSON line; whether the card ever held more than
 * the limit is in the board's file. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../native/limiter/ledger.h"
#include "waits.h"
#include "ways.h"

enum { MAX_PROCESSES = 512, MAX_THREADS = 64, NUM_THINGS = 4, DEFAULT_PAUSE_US = 20000 };

typedef struct {
    uint64_t num_calls, num_refused, worst_call_ns, worst_own_ns, worst_blocked_ns;
    uint64_t by_way[NUM_WAYS];
} Results;

static Results *results;
static uint64_t seed, pause_us = DEFAULT_PAUSE_US; /* between the calls of a thread, and between kills; on average */

static uint64_t random_below(uint64_t *state, uint64_t bound) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return (*state >> 11) % bound;
}

static void raise_to(uint64_t *cell, uint64_t value) {
    uint64_t known = __atomic_load_n(cell, __ATOMIC_RELAXED);
    while (value > known &&
           !__atomic_compare_exchange_n(cell, &known, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* ---- a child ---- */

static long num_sleeps(void) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

/* What is not the limiter's doing: what the process waited for the fake's own locks, and the thread, or the owner of a
 * lock that it waited for, for a core. */
static uint64_t waited_elsewhere_ns(void) {
    return fake_waited_ns() + waited_for_core_ns() + waited_for_owners_ns();
}

static CUresult timed(const Place *place, Thing *thing, size_t size) {
    uint64_t start = now_ns(), waited = waited_elsewhere_ns();
    long sleeps = num_sleeps();
    CUresult result = size ? ways[thing->kind].take(place, thing, size) : ways[thing->kind].give(place, thing);
    uint64_t spent = now_ns() - start, elsewhere = waited_elsewhere_ns() - waited;
    uint64_t own = spent > elsewhere ? spent - elsewhere : 0;
    raise_to(&results->worst_call_ns, spent);
    raise_to(&results->worst_own_ns, own);
    if (num_sleeps() != sleeps) raise_to(&results->worst_blocked_ns, own);
    __atomic_fetch_add(&results->num_calls, 1, __ATOMIC_RELAXED);
    return result;
}

static void one_step(const Place *place, Thing *thing, uint64_t *random) {
    if (thing->pointer) {
        if (timed(place, thing, 0) != CUDA_SUCCESS) abort();
        *thing = (Thing){0};
        return;
    }
    thing->kind = (int)random_below(random, NUM_WAYS);
    size_t size = ((size_t)4096 << random_below(random, 14)) + random_below(random, 4096);
    if (timed(place, thing, size) != CUDA_SUCCESS) {
        __atomic_fetch_add(&results->num_refused, 1, __ATOMIC_RELAXED);
        *thing = (Thing){0};
        return;
    }
    __atomic_fetch_add(&results->by_way[thing->kind], 1, __ATOMIC_RELAXED);
}

static void *run_thread(void *argument) {
    Place place = *(Place *)argument;
    Thing things[NUM_THINGS] = {0};
    uint64_t random = (seed ^ ((uint64_t)gettid() << 20)) * 0x9e3779b97f4a7c15u + 1;
    cuCtxSetCurrent(place.context);
    cuStreamCreate(&place.stream, 0);
    for (;;) {
        one_step(&place, &things[random_below(&random, NUM_THINGS)], &random);
        if (random_below(&random, 64) == 0) cuStreamSynchronize(place.stream);
        usleep((useconds_t)random_below(&random, 2 * pause_us));
    }
    return NULL;
}

static int run_child(int num_threads) {
    Place place = {0};
    pthread_t thread;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (cuInit(0) != CUDA_SUCCESS) return 1;
    while (place_open(&place) != CUDA_SUCCESS) usleep(10000); /* the limit is full of others */
    for (int index = 1; index < num_threads; index++) pthread_create(&thread, NULL, run_thread, &place);
    run_thread(&place);
    return 0;
}

/* ---- the parent ---- */

static pid_t start_child(char **argv) {
    pid_t child = fork();
    if (child < 0) abort(); /* -1 would be everybody, to the one who kills */
    if (child) return child;
    char *arguments[] = {argv[0], "child", argv[2], argv[4], argv[5], NULL};
    execv("/proc/self/exe", arguments);
    _exit(127);
}

static Ledger *map_file(const char *path, size_t size) {
    FILE *file = fopen(path, "r+");
    void *mapped = file ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0) : MAP_FAILED;
    if (file) fclose(file);
    return mapped == MAP_FAILED ? NULL : mapped;
}

/* On its account, or in a last change that nobody has carried over to the account yet. */
static bool holds(const Ledger *ledger, pid_t pid) {
    Word total = ledger->devices[0].total;
    for (int slot = 0; slot < LEDGER_SLOTS; slot++) {
        if (ledger->slots[slot].pid != (uint64_t)pid) continue;
        Word account = ledger->slots[slot].accounts[0];
        bool is_last = (int)(total.high >> 1 & 0x7fff) == slot && account.high < total.high >> 16;
        if (is_last || account.low) return true;
    }
    return false;
}

/* Without what it waited for a core, which the kernel may count a little late. */
typedef struct {
    uint64_t clock_ns, waited_ns;
} Moment;

static Moment own_now(void) {
    Moment moment = {now_ns(), waited_for_core_ns()};
    return moment;
}

static uint64_t own_ns_since(Moment start) {
    Moment now = own_now();
    uint64_t spent = now.clock_ns - start.clock_ns, waited = now.waited_ns - start.waited_ns;
    return spent > waited ? spent - waited : 0;
}

/* Looks as any reader would: by asking how much is free. */
static uint64_t time_until_returned(const Ledger *ledger, pid_t pid, Moment death) {
    size_t free_bytes, total_bytes;
    while (holds(ledger, pid)) {
        cuMemGetInfo_v2(&free_bytes, &total_bytes);
        usleep(1000);
    }
    return own_ns_since(death);
}

static void reap_all(pid_t *children, int count) {
    for (int index = 0; index < count; index++) kill(children[index], SIGKILL);
    for (int index = 0; index < count; index++) waitpid(children[index], NULL, 0);
}

static void print_count(const char *name, uint64_t count) {
    printf("\"%s\": %llu, ", name, (unsigned long long)count);
}

static double in_ms(uint64_t ns) { return (double)ns / 1e6; }

static void print_results(const Ledger *ledger, uint64_t num_kills, uint64_t worst_death_ns, uint64_t worst_return_ns) {
    printf("{");
    print_count("calls", results->num_calls);
    print_count("refused", results->num_refused);
    print_count("kills", num_kills);
    print_count("left_units", ledger->devices[0].total.low & MAX_UNITS);
    print_count("peak_units", ledger->devices[0].peak_units);
    for (int way = 0; way < NUM_WAYS; way++) print_count(ways[way].name, results->by_way[way]);
    printf("\"worst_call_ms\": %.3f, \"worst_own_ms\": %.3f, \"worst_blocked_ms\": %.3f, ",
           in_ms(results->worst_call_ns), in_ms(results->worst_own_ns), in_ms(results->worst_blocked_ns));
    printf("\"worst_death_ms\": %.3f, \"worst_return_ms\": %.3f}\n", in_ms(worst_death_ns), in_ms(worst_return_ns));
}

static int run_parent(int num_processes, char **argv) {
    pid_t children[MAX_PROCESSES];
    uint64_t random = seed * 0x9e3779b97f4a7c15u + 1, num_kills = 0;
    uint64_t worst_death_ns = 0, worst_return_ns = 0;
    uint64_t end_ns = now_ns() + strtoull(argv[3], NULL, 10) * 1000000000u;
    CUcontext context;
    if (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS) return 1;
    cuCtxSetCurrent(context);
    Ledger *ledger = map_file(getenv("KVARTO_GPU_MEMORY_LEDGER"), sizeof(Ledger));
    if (!ledger) return 1;
    for (int index = 0; index < num_processes; index++) children[index] = start_child(argv);
    while (now_ns() < end_ns) {
        usleep((useconds_t)random_below(&random, 2 * pause_us));
        int victim = (int)random_below(&random, (uint64_t)num_processes);
        Moment kill_time = own_now();
        kill(children[victim], SIGKILL);
        if (waitpid(children[victim], NULL, 0) != children[victim]) return 1;
        raise_to(&worst_death_ns, own_ns_since(kill_time));
        Moment death = own_now();
        fake_forget((uint64_t)children[victim]);
        raise_to(&worst_return_ns, time_until_returned(ledger, children[victim], death));
        children[victim] = start_child(argv);
        num_kills++;
    }
    reap_all(children, num_processes);
    for (int index = 0; index < num_processes; index++) time_until_returned(ledger, children[index], own_now());
    cuDevicePrimaryCtxReset_v2(0);
    print_results(ledger, num_kills, worst_death_ns, worst_return_ns);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    results = (Results *)map_file(getenv("STRESS_RESULTS"), sizeof *results);
    if (!results) return 2;
    bool is_child = strcmp(argv[1], "child") == 0;
    seed = strtoull(argv[is_child ? 3 : 4], NULL, 10);
    if (argc > (is_child ? 4 : 5)) pause_us = strtoull(argv[is_child ? 4 : 5], NULL, 10);
    return is_child ? run_child(atoi(argv[2])) : run_parent(atoi(argv[1]), argv);
}
