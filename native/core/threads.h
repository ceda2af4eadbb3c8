// A team of threads that walks a step together: low-latency barriers, and work taken item by item between them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace kvarto {

class Team;

// One thread's part in a step. Valid inside `Team::run` only.
class Worker {
public:
    Worker(Team& team, int32_t index) : team_(team), index_(index) {}
    int32_t index() const { return index_; }
    int32_t num_workers() const;
    // Waits for all workers, and starts the next phase: `take` counts from 0 again. Memory written before it by any
    // worker is seen after it by all. Spins for at most 20 µs, then sleeps.
    void barrier();
    // The next item of this phase that nobody has taken: 0, 1, 2, … without end; the caller stops at its own count.
    int64_t take();
    // The same of a second kind of item: work that shares a phase with what `take` counts.
    int64_t take_side();

private:
    Team& team_;
    int32_t index_;
};

// `num_threads - 1` threads of its own and the caller of `run`.
class Team {
public:
    explicit Team(int32_t num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;
    int32_t num_threads() const;
    // Calls `work(worker)` on every thread of the team, and returns when all have returned. Not reentrant.
    void run(const std::function<void(Worker&)>& work);

private:
    friend class Worker;
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace kvarto
