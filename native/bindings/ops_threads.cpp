// The team of threads on its own, for tests and for measuring what a barrier costs.
#include <nanobind/nanobind.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

namespace {

// Phases in which items are taken and marked; after each barrier every worker looks at all marks of the phase before.
// Marks are plain memory: a barrier that let a worker through too early would be a data race too.
class Trial {
public:
    Trial(int32_t num_phases, int64_t num_items, std::chrono::microseconds pause)
        : num_phases_(num_phases), num_items_(num_items), pause_(pause), marks_(num_phases * num_items) {}

    void work(Worker& worker) {
        for (int32_t phase = 0; phase < num_phases_; ++phase) {
            if (phase > 0) worker.barrier();
            if (pause_.count() > 0 && phase % worker.num_workers() == worker.index()) std::this_thread::sleep_for(pause_);
            if (phase > 0 && !is_whole(phase - 1)) num_early_.fetch_add(1);
            for (int64_t item = worker.take(); item < num_items_; item = worker.take()) ++mark(phase, item);
        }
    }
    // Phases that a worker found unfinished, and items that were not taken exactly once.
    int64_t num_faults() {
        int64_t faults = num_early_;
        for (int32_t phase = 0; phase < num_phases_; ++phase) faults += is_whole(phase) ? 0 : 1;
        return faults;
    }

private:
    int32_t& mark(int32_t phase, int64_t item) { return marks_[phase * num_items_ + item]; }
    bool is_whole(int32_t phase) {
        for (int64_t item = 0; item < num_items_; ++item)
            if (mark(phase, item) != 1) return false;
        return true;
    }

    const int32_t num_phases_;
    const int64_t num_items_;
    const std::chrono::microseconds pause_;
    std::vector<int32_t> marks_;
    std::atomic<int64_t> num_early_{0};
};

int64_t try_team(int32_t num_threads, int32_t num_runs, int32_t num_phases, int64_t num_items, int64_t pause_us) {
    if (num_threads < 1 || num_phases < 1 || num_items < 0) throw std::invalid_argument("counts are positive");
    const nb::gil_scoped_release released;
    Team team(num_threads);
    int64_t faults = 0;
    for (int32_t run = 0; run < num_runs; ++run) {
        Trial trial(num_phases, num_items, std::chrono::microseconds(pause_us));
        team.run([&trial](Worker& worker) { trial.work(worker); });
        faults += trial.num_faults();
    }
    return faults;
}

double barrier_seconds(int32_t num_threads, int32_t num_barriers) {
    const nb::gil_scoped_release released;
    Team team(num_threads);
    const auto start = std::chrono::steady_clock::now();
    team.run([num_barriers](Worker& worker) {
        for (int32_t i = 0; i < num_barriers; ++i) worker.barrier();
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / num_barriers;
}

}  // namespace

void bind_ops_threads(nb::module_& ops) {
    ops.def("try_team", &try_team, "num_threads"_a, "num_runs"_a, "num_phases"_a, "num_items"_a, "pause_us"_a,
            "Phases of items on a team; returns how many phases were seen unfinished or had items lost or repeated.");
    ops.def("barrier_seconds", &barrier_seconds, "num_threads"_a, "num_barriers"_a, "What one barrier takes.");
}

}  // namespace kvarto
