// A compiled program: a flat list of ops with every address resolved, walked once per step by a team of threads.
//
//   phase   one op for the whole team (it divides its work itself), or row ops: workers take chunks of rows. A run of
//           ops that change the same rows in place is one phase: each chunk goes through all of them
//   step    phase, barrier, phase, barrier, …   no allocation, no lock, no system call but to sleep in a long barrier
//
// In a step with adapters, the phase of an op that one of them updates has barriers inside: what adapters make of its
// input is computed beside its own product, and added behind a barrier. Other phases, and other steps, are as ever.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "core/adapters.h"
#include "core/kernels.h"
#include "core/ops.h"
#include "core/step.h"
#include "core/threads.h"

namespace kvarto {

using AnyOp = std::variant<EmbedOp, NormOp, HeadNormOp, RopeOp, WriteKVOp, GatedActivationOp, ActivateOp, GatherOp,
                           LinearOp, AttentionOp, RouteOp, ExpertsOp, LogitsOp, SampleOp>;

class Executor {
public:
    Executor(const Kernels& kernels, int32_t num_threads, AdapterTable& adapters)
        : kernels_(kernels), adapters_(adapters), team_(num_threads) {}
    // Appends an op. Its order is the program's.
    void add(AnyOp op);
    // Appends a gated activation of what the op before, a linear, has written, when nothing else reads that.
    void add_to_linear(GatedActivationOp op);
    int32_t num_ops() const { return static_cast<int32_t>(ops_.size()); }
    const AnyOp& op(int32_t index) const { return ops_[static_cast<size_t>(index)]; }
    // One pass. The arrays of `step` must stay until it returns; adapters that it names are bound.
    void run(const StepView& step) { run(step, {}); }
    // The same, measured: `ends_ns` [num_phases] receives when all had passed each phase, from the start of the first.
    void run(const StepView& step, std::span<int64_t> ends_ns);
    // Phases of a step, each but the last followed by a barrier.
    int64_t num_phases() const { return static_cast<int64_t>(phases_.size()); }
    // Index of the phase's first op.
    int64_t first_op(int64_t phase) const { return static_cast<int64_t>(phases_[static_cast<size_t>(phase)].first); }

private:
    enum class Space : uint8_t { kTeam, kTokens, kSamples };  // who runs a phase, or the rows that it goes over
    struct Phase {
        Space space;
        size_t first, last;  // ops
    };
    static Space space_of(const AnyOp& op);
    void walk(const StepView& step, std::span<int64_t> ends_ns);
    void run_phase(const Phase& phase, const StepView& step, Worker& worker) const;
    void run_rows(const Phase& phase, const StepView& step, Worker& worker, int64_t num_rows) const;
    void add_adapters(const AnyOp& any, const StepView& step, Worker& worker) const;
    void add_adapters(const AdapterWork& work, void (*replace_tokens)(const AdapterWork&, Worker&), Worker& worker) const;

    const Kernels& kernels_;
    AdapterTable& adapters_;
    Team team_;
    std::vector<AnyOp> ops_;
    std::vector<Phase> phases_;
};

}  // namespace kvarto
