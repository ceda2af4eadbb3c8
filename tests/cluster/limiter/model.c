/* The ledger under a seeded scheduler that may switch, kill or fork before every atomic step.
 *
 * Virtual processes are coroutines over one ledger; the "driver" is a number per process, kept here and nowhere else.
 * Checked: the driver never holds more than the limit (overshoot 0), the ledger never holds less than the driver, a
 * thread that runs alone finishes its operation (nobody waits for a stopped process), and at rest the total, the sum of
 * the accounts and the truth are equal.
 *
 *     model FIRST_SEED NUM_SCHEDULES      prints one JSON line; exit code 1 and the seed at the first broken law
 */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

static void model_step(void);
#define LIMITER_STEP() model_step()
#include "ledger.c"

enum {
    MAX_THREADS = 12,     /* over all processes of one schedule, and one that looks at the end */
    MAX_PROCESSES = 8,    /* forks included, and that one */
    STACK_BYTES = 1 << 15,
    NUM_LOCKS = 9,        /* slots in use: few, so that they are taken over often */
    LIMIT_UNITS = 40,
    OPERATIONS = 6,
    SOLO_STEPS = 4000,    /* a sweep over all devices and a few slots, many times over */
};

typedef struct {
    bool is_alive;
    int slot; /* -1: not attached */
    uint64_t truth;
} Process;

typedef struct {
    bool is_running;
    int process;
    uint64_t num_operations, held[OPERATIONS];
    jmp_buf resume;
    ucontext_t start;
    char *stack;
    bool is_started;
} Thread;

static Ledger ledger;
static Process processes[MAX_PROCESSES];
static Thread threads[MAX_THREADS];
static int lock_owner[NUM_LOCKS]; /* process, or -1: what the file lock of a slot is in the library */
static int num_threads, num_processes, current;
static const int device = 0;
static int kills, forks, refusals;
static jmp_buf scheduler;
static ucontext_t scheduler_start;
static uint64_t seed, random_state, num_steps;
static uint64_t total_steps, total_kills, total_forks, total_refusals, total_solo;

static uint64_t random_below(uint64_t bound) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) % bound;
}

static void broken(const char *law) {
    printf("{\"broken\": \"%s\", \"seed\": %llu}\n", law, (unsigned long long)seed);
    exit(1);
}

static uint64_t truth(void) {
    uint64_t sum = 0;
    for (int process = 0; process < num_processes; process++) sum += processes[process].truth;
    return sum;
}

static void model_step(void) {
    num_steps++;
    if (_setjmp(threads[current].resume) == 0) _longjmp(scheduler, 1);
}

static void check_driver(void) {
    if (truth() > LIMIT_UNITS) broken("overshoot");
    if ((ledger.devices[device].total.low & MAX_UNITS) < truth()) broken("the ledger holds less than the driver");
}

static bool is_dead(const LedgerSlot *slot, uint32_t index, void *context) {
    (void)slot, (void)context;
    model_step();
    return lock_owner[index] < 0;
}

static void attach(Process *process, int id) {
    while (process->slot < 0) {
        int slot = (int)random_below(NUM_LOCKS);
        model_step();
        if (lock_owner[slot] >= 0) continue;
        lock_owner[slot] = id;
        ledger_take_slot(&ledger, (uint32_t)slot, (uint64_t)id, 1, 1, "model");
        process->slot = slot; /* the other threads of this process wait for it, as in the library */
    }
}

static void allocate(Process *process, Thread *thread, int operation) {
    uint64_t units = 1 + random_below(LIMIT_UNITS / 2);
    uint32_t slot = (uint32_t)process->slot;
    if (!ledger_reserve(&ledger, device, slot, units)) {
        refusals++;
        ledger_sweep(&ledger, device, slot, is_dead, NULL);
        if (!ledger_reserve(&ledger, device, slot, units)) return;
    }
    model_step();
    if (random_below(8) == 0) { /* the driver refuses */
        ledger_release(&ledger, device, slot, units);
        return;
    }
    process->truth += units;
    check_driver();
    thread->held[operation] = units;
}

static void release(Process *process, Thread *thread, int operation) {
    uint64_t units = thread->held[operation];
    if (units == 0) return;
    model_step();
    process->truth -= units; /* the driver first: its bytes are gone before anyone may take them */
    thread->held[operation] = 0;
    ledger_release(&ledger, device, (uint32_t)process->slot, units);
}

static void run_thread(void) {
    Thread *thread = &threads[current];
    Process *process = &processes[thread->process];
    attach(process, thread->process);
    for (int operation = 0; operation < OPERATIONS; operation++) {
        allocate(process, thread, operation);
        thread->num_operations++;
        if (random_below(2)) release(process, thread, (int)random_below((uint64_t)operation + 1));
        thread->num_operations++;
    }
    thread->is_running = false;
    _longjmp(scheduler, 1);
}

static void add_thread(int process) {
    Thread *thread = &threads[num_threads++];
    char *stack = thread->stack ? thread->stack : malloc(STACK_BYTES);
    memset(thread, 0, sizeof *thread);
    thread->stack = stack;
    thread->process = process;
    thread->is_running = true;
    getcontext(&thread->start);
    thread->start.uc_stack = (stack_t){.ss_sp = stack, .ss_size = STACK_BYTES};
    makecontext(&thread->start, run_thread, 0);
}

static void add_process(void) {
    processes[num_processes] = (Process){.is_alive = true, .slot = -1};
    add_thread(num_processes++);
}

static void run_one_step(int thread) {
    current = thread;
    if (_setjmp(scheduler) != 0) return;
    if (threads[thread].is_started) _longjmp(threads[thread].resume, 1);
    threads[thread].is_started = true;
    swapcontext(&scheduler_start, &threads[thread].start);
}

static void kill_process(int process) {
    Process *victim = &processes[process];
    if (!victim->is_alive) return;
    victim->is_alive = false;
    victim->truth = 0;
    for (int thread = 0; thread < num_threads; thread++) {
        if (threads[thread].process == process) threads[thread].is_running = false;
    }
    for (int slot = 0; slot < NUM_LOCKS; slot++) {
        if (lock_owner[slot] == process) lock_owner[slot] = -1;
    }
    kills++;
}

/* A second thread may start once its process has its slot: attaching is once per process. */
static bool can_add_thread(int process) {
    return num_threads < MAX_THREADS - 1 && processes[process].is_alive && processes[process].slot >= 0;
}

static int pick_thread(const int *stalled) {
    int running[MAX_THREADS], count = 0, moving = 0;
    for (int thread = 0; thread < num_threads; thread++) {
        if (threads[thread].is_running) running[count++] = thread;
    }
    for (int index = 0; index < count; index++) {
        if (!stalled[running[index]]) running[moving++] = running[index];
    }
    return count == 0 ? -1 : running[random_below((uint64_t)(moving ? moving : count))];
}

/* Everybody else is stopped for good; this one must still get through the operation that it is in. */
static void run_alone(int thread) {
    uint64_t goal = threads[thread].num_operations + 1, limit = num_steps + SOLO_STEPS;
    if (processes[threads[thread].process].slot < 0) return;
    while (threads[thread].is_running && threads[thread].num_operations < goal) {
        if (num_steps > limit) broken("a thread that runs alone does not finish");
        run_one_step(thread);
    }
    total_solo++;
}

static void disturb(int thread, int *stalled) {
    int process = threads[thread].process;
    switch (random_below(160)) {
        case 0: if (kills < 4) kill_process(process); break;
        case 1: if (num_processes < MAX_PROCESSES - 1 && num_threads < MAX_THREADS - 1) add_process(), forks++; break;
        case 2: if (can_add_thread(process)) add_thread(process); break;
        case 3: stalled[thread] = 1; break;
        case 4: stalled[random_below(MAX_THREADS)] = 0; break;
        case 5: if (random_below(4) == 0) run_alone(thread); break;
        default: break;
    }
}

static void check_at_rest(void) {
    add_process(); /* a newcomer: whatever was left half done is finished by whoever comes next */
    while (threads[num_threads - 1].is_running) run_one_step(num_threads - 1);
    uint64_t used = ledger.devices[device].total.low & MAX_UNITS, accounts = 0, dead = 0;
    for (int slot = 0; slot < NUM_LOCKS; slot++) {
        uint64_t units = ledger.slots[slot].accounts[device].low;
        accounts += units;
        if (lock_owner[slot] < 0) dead += units;
    }
    if (used != accounts) broken("total is not the sum of the accounts");
    if (used - dead != truth()) broken("the account of the living is not the truth");
}

static void run_schedule(void) {
    int stalled[MAX_THREADS] = {0};
    memset(&ledger, 0, sizeof ledger.devices + offsetof(Ledger, devices) + NUM_LOCKS * sizeof(LedgerSlot));
    for (int slot = 0; slot < NUM_LOCKS; slot++) lock_owner[slot] = -1;
    num_threads = num_processes = kills = forks = refusals = 0;
    random_state = seed * 0x9e3779b97f4a7c15u + 1;
    num_steps = 0;
    ledger.magic = LEDGER_MAGIC;
    ledger.devices[device].uuid = (Word){.low = 1, .high = 2};
    ledger.devices[device].limit_plus_one = LIMIT_UNITS * UNIT_BYTES + 1;
    for (uint64_t first = 2 + random_below(3); first > 0; first--) add_process();
    for (int thread; (thread = pick_thread(stalled)) >= 0;) {
        run_one_step(thread);
        disturb(thread, stalled);
    }
    check_at_rest();
    total_steps += num_steps, total_kills += (uint64_t)kills, total_forks += (uint64_t)forks;
    total_refusals += (uint64_t)refusals;
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, count = argc > 2 ? strtoull(argv[2], NULL, 10) : 1000;
    for (seed = first; seed < first + count; seed++) run_schedule();
    printf("{\"schedules\": %llu, \"steps\": %llu, \"kills\": %llu, \"forks\": %llu, \"refusals\": %llu, "
           "\"solo\": %llu, \"overshoot_bytes\": 0}\n",
           (unsigned long long)count, (unsigned long long)total_steps, (unsigned long long)total_kills,
           (unsigned long long)total_forks, (unsigned long long)total_refusals, (unsigned long long)total_solo);
    return 0;
}
