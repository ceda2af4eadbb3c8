#include "core/executor.h"

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <utility>

namespace kvarto {

namespace {

// Rows that a worker takes at once: few enough to share evenly, many enough that taking costs nothing beside them.
constexpr int64_t kMostRows = 16, kItemsPerWorker = 4;

int64_t chunk_rows(int64_t num_rows, int32_t num_workers) {
    return std::clamp<int64_t>(num_rows / (num_workers * kItemsPerWorker), 1, kMostRows);
}

// Whose rows an op goes over: the buffer that it writes.
const Rows& rows_of(const EmbedOp& op) { return op.out; }
const Rows& rows_of(const NormOp& op) { return op.out; }
const Rows& rows_of(const HeadNormOp& op) { return op.qkv; }
const Rows& rows_of(const RopeOp& op) { return op.qkv; }
const Rows& rows_of(const WriteKVOp& op) { return op.qkv; }
const Rows& rows_of(const GatedActivationOp& op) { return op.out; }
const Rows& rows_of(const ActivateOp& op) { return op.out; }
const Rows& rows_of(const GatherOp& op) { return op.out; }

template <class Op>
concept RowOp = requires(const Op& op) { rows_of(op); };

auto kernel_of(const Kernels& kernels, const EmbedOp&) { return kernels.embed; }
auto kernel_of(const Kernels& kernels, const NormOp&) { return kernels.norm; }
auto kernel_of(const Kernels& kernels, const HeadNormOp&) { return kernels.head_norm; }
auto kernel_of(const Kernels& kernels, const RopeOp&) { return kernels.rope; }
auto kernel_of(const Kernels& kernels, const WriteKVOp&) { return kernels.write_kv; }
auto kernel_of(const Kernels& kernels, const GatedActivationOp&) { return kernels.gated_activation; }
auto kernel_of(const Kernels& kernels, const ActivateOp&) { return kernels.activate; }
auto kernel_of(const Kernels& kernels, const GatherOp&) { return kernels.gather; }
auto kernel_of(const Kernels& kernels, const LinearOp&) { return kernels.linear; }
auto kernel_of(const Kernels& kernels, const AttentionOp&) { return kernels.attention; }
auto kernel_of(const Kernels& kernels, const RouteOp&) { return kernels.route; }
auto kernel_of(const Kernels& kernels, const ExpertsOp&) { return kernels.experts; }
auto kernel_of(const Kernels& kernels, const LogitsOp&) { return kernels.logits; }
auto kernel_of(const Kernels& kernels, const SampleOp&) { return kernels.sample; }

// Where an op changes rows in place, or only reads them; null for others.
const std::byte* rows_in_place(const AnyOp& any) {
    return std::visit(
        []<class Op>(const Op& op) -> const std::byte* {
            if constexpr (std::is_same_v<Op, HeadNormOp> || std::is_same_v<Op, RopeOp> || std::is_same_v<Op, WriteKVOp>)
                return op.qkv.data;
            else return nullptr;
        },
        any);
}

// Whether two ops may be brought through a few rows together. Only in place: another buffer that the second writes may
// have been planned where rows lie that the first has yet to read.
bool may_follow(const AnyOp& first, const AnyOp& second) {
    return rows_in_place(second) != nullptr && rows_in_place(first) == rows_in_place(second);
}

// Whether a linear can write what a gated activation makes of its products: gates and gated in whole panels of one form.
bool may_gate(const LinearOp& linear, const GatedActivationOp& op) {
    const std::vector<Part>& parts = linear.weight.parts;
    const bool in_halves = parts.size() == 2 && parts[0].num_rows == parts[1].num_rows &&
                           parts[0].format == parts[1].format && parts[0].group_size == parts[1].group_size;
    return linear.products == Products::kBF16 && linear.bias == nullptr && op.out.form == RowForm::kBF16 &&
           linear.x.per_sample == op.out.per_sample &&
           (in_halves || parts.size() == 1) && op.out.width % kLanes == 0 && linear.weight.num_rows == 2 * op.out.width;
}

// Where an op that adapters may update keeps its index; null for others.
int32_t* index_of(AnyOp& any) {
    if (auto* linear = std::get_if<LinearOp>(&any)) return &linear->index;
    if (auto* logits = std::get_if<LogitsOp>(&any)) return &logits->linear.index;
    if (auto* embed = std::get_if<EmbedOp>(&any)) return &embed->index;
    return nullptr;
}

}  // namespace

Executor::Space Executor::space_of(const AnyOp& op) {
    return std::visit(
        []<class Op>(const Op& known) {
            if constexpr (RowOp<Op>) return rows_of(known).per_sample ? Space::kSamples : Space::kTokens;
            else return Space::kTeam;
        },
        op);
}

void Executor::add(AnyOp op) {
    const Space space = space_of(op);
    const size_t index = ops_.size();
    if (int32_t* known = index_of(op)) *known = static_cast<int32_t>(index);
    ops_.push_back(std::move(op));
    if (index > 0 && may_follow(ops_[index - 1], ops_[index]))
        phases_.back().last = index + 1;
    else
        phases_.push_back({space, index, index + 1});
}

void Executor::add_to_linear(GatedActivationOp op) {
    auto* linear = ops_.empty() ? nullptr : std::get_if<LinearOp>(&ops_.back());
    if (linear != nullptr && linear->out.data == op.x.data && may_gate(*linear, op)) {
        linear->gated = op.out;
        linear->activation = op.activation;
        op.is_fused = true;
        op.linear = linear->index;
    }
    add(op);
}

void Executor::run(const StepView& step, std::span<int64_t> ends_ns) {
    adapters_.prepare(step);
    StepView prepared = step;
    prepared.updated = adapters_.updated();
    walk(prepared, ends_ns);
}

void Executor::walk(const StepView& step, std::span<int64_t> ends_ns) {
    using Clock = std::chrono::steady_clock;
    const bool measures = !ends_ns.empty();
    const auto start = measures ? Clock::now() : Clock::time_point{};
    const auto since_start = [start] { return std::chrono::nanoseconds(Clock::now() - start).count(); };
    team_.run([&](Worker& worker) {
        for (size_t phase = 0; phase < phases_.size(); ++phase) {
            if (phase > 0) {
                worker.barrier();
                if (measures && worker.index() == 0) ends_ns[phase - 1] = since_start();
            }
            run_phase(phases_[phase], step, worker);
        }
    });
    if (measures) ends_ns.back() = since_start();
}

void Executor::run_phase(const Phase& phase, const StepView& step, Worker& worker) const {
    if (phase.space == Space::kTokens) {
        run_rows(phase, step, worker, step.num_tokens);
    } else if (phase.space == Space::kSamples) {
        run_rows(phase, step, worker, step.num_samples);
    } else {
        std::visit(
            [&]<class Op>(const Op& op) {
                if constexpr (!RowOp<Op>) kernel_of(kernels_, op)(op, step, worker);
            },
            ops_[phase.first]);
    }
    if (step.is_updated(static_cast<int32_t>(phase.first))) add_adapters(ops_[phase.first], step, worker);
}

void Executor::add_adapters(const AnyOp& any, const StepView& step, Worker& worker) const {
    AdapterWork work;
    if (const auto* embed = std::get_if<EmbedOp>(&any)) {
        work = {.x = {}, .out = embed->out, .sums = embed->sums, .rows = adapters_.rows(false), .op = embed->index,
                .bias = embed->position_table, .bias_rows = embed->position_table ? step.positions : nullptr,
                .token_ids = step.token_ids, .scale = embed->scale};
        return add_adapters(work, kernels_.adapter_embeddings, worker);
    }
    const auto* logits = std::get_if<LogitsOp>(&any);
    const LinearOp& linear = logits != nullptr ? logits->linear : std::get<LinearOp>(any);
    work = {.x = linear.x, .out = linear.out, .sums = linear.sums, .rows = adapters_.rows(linear.x.per_sample),
            .op = linear.index, .bias = linear.bias};
    add_adapters(work, kernels_.adapter_logits, worker);
    if (logits == nullptr) return;
    worker.barrier();
    kernels_.finish_logits(*logits, step, worker);
}

void Executor::add_adapters(const AdapterWork& work, void (*replace_tokens)(const AdapterWork&, Worker&),
                            Worker& worker) const {
    kernels_.adapter_shrink(work, worker);
    worker.barrier();
    if (work.has_tokens()) {
        replace_tokens(work, worker);
        worker.barrier();
    }
    kernels_.adapter_expand(work, worker);
}

void Executor::run_rows(const Phase& phase, const StepView& step, Worker& worker, int64_t num_rows) const {
    const int64_t chunk = chunk_rows(num_rows, worker.num_workers());
    for (int64_t first = worker.take() * chunk; first < num_rows; first = worker.take() * chunk) {
        const int64_t last = std::min(first + chunk, num_rows);
        for (size_t index = phase.first; index < phase.last; ++index)
            std::visit(
                [&]<class Op>(const Op& op) {
                    if constexpr (RowOp<Op>) kernel_of(kernels_, op)(op, step, first, last);
                },
                ops_[index]);
    }
}

}  // namespace kvarto
