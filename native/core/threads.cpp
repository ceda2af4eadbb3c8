// A barrier is an epoch that the last worker to arrive moves on. Those who wait watch it, first spinning, then asleep
// in the kernel; whoever moves it pays for a wake-up only where somebody sleeps.
#include "core/threads.h"

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <signal.h>

namespace kvarto {

namespace {

constexpr auto kSpinTime = std::chrono::microseconds(20);
constexpr int kSpinsPerLook = 32;  // reading the clock costs about as much as a pause

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until `epoch` is no longer `old`. What was written before it changed is then seen.
void await_change(const std::atomic<uint32_t>& epoch, uint32_t old) {
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int i = 0; i < kSpinsPerLook; ++i) {
            if (epoch.load(std::memory_order_acquire) != old) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    while (epoch.load(std::memory_order_acquire) == old) epoch.wait(old, std::memory_order_acquire);
}

void advance(std::atomic<uint32_t>& epoch) {
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
}

}  // namespace

struct Team::State {
    explicit State(int32_t num) : num_threads(num) {}

    const int32_t num_threads;
    // Each on a cache line of its own: one is written by all at every item, one read by all at every barrier.
    alignas(64) std::atomic<int64_t> next_item{0};
    alignas(64) std::atomic<int64_t> next_side_item{0};
    alignas(64) std::atomic<int32_t> num_arrived{0};
    alignas(64) std::atomic<uint32_t> phase{0};  // epoch of the barrier
    alignas(64) std::atomic<uint32_t> call{0};   // epoch of `run`
    const std::function<void(Worker&)>* work = nullptr;  // of this call; null ends the threads
    std::vector<std::thread> threads;

    void arrive();
    void serve(Team& team, int32_t index);
    void start(Team& team);
    void stop();
};

void Team::State::arrive() {
    const uint32_t old = phase.load(std::memory_order_relaxed);  // cannot move before this worker has arrived
    if (num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads) return await_change(phase, old);
    num_arrived.store(0, std::memory_order_relaxed);
    next_item.store(0, std::memory_order_relaxed);
    next_side_item.store(0, std::memory_order_relaxed);
    advance(phase);
}

void Team::State::serve(Team& team, int32_t index) {
    Worker worker(team, index);
    for (uint32_t seen = 0;; ++seen) {
        await_change(call, seen);
        if (work == nullptr) return;
        (*work)(worker);
        arrive();
    }
}

int32_t Worker::num_workers() const { return team_.state_->num_threads; }

void Worker::barrier() { team_.state_->arrive(); }

int64_t Worker::take() { return team_.state_->next_item.fetch_add(1, std::memory_order_relaxed); }

int64_t Worker::take_side() { return team_.state_->next_side_item.fetch_add(1, std::memory_order_relaxed); }

void Team::State::start(Team& team) {
    // Signals are the main thread's: a handler that ran here would wait for the interpreter inside a step.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int32_t index = 1; index < num_threads; ++index) {
        auto& thread = threads.emplace_back([this, &team, index] { serve(team, index); });
        pthread_setname_np(thread.native_handle(), ("kvarto-" + std::to_string(index)).substr(0, 15).c_str());
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Team::State::stop() {
    work = nullptr;
    advance(call);
    for (auto& thread : threads) thread.join();
}

Team::Team(int32_t num_threads) : state_(std::make_unique<State>(num_threads)) {
    try {
        state_->start(*this);
    } catch (...) {  // the system refused a thread: those that there are must end before they go
        state_->stop();
        throw;
    }
}

Team::~Team() { state_->stop(); }

int32_t Team::num_threads() const { return state_->num_threads; }

void Team::run(const std::function<void(Worker&)>& work) {
    state_->work = &work;
    if (state_->num_threads > 1) advance(state_->call);
    Worker worker(*this, 0);
    work(worker);
    state_->arrive();  // the others are done, and the next call counts from 0
}

}  // namespace kvarto
