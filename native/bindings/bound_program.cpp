#include "bindings/bound_program.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "bindings/step_arrays.h"
#include "core/isa.h"

namespace nb = nanobind;

namespace kvarto {

namespace {

constexpr int64_t kFloat = sizeof(float);

// The member of an enumeration at a place that Python gave.
template <class Enum> Enum member(int32_t place, Enum last) {
    if (place < 0 || place > static_cast<int32_t>(last))
        throw std::invalid_argument("no member " + std::to_string(place) + " of an enumeration");
    return static_cast<Enum>(place);
}

uint64_t next_number() {
    static std::atomic<uint64_t> number = 0;
    return ++number;
}

}  // namespace

BoundProgram::BoundProgram(const std::string& isa, int32_t num_threads, uintptr_t arena, int64_t arena_bytes,
                           StepBounds bounds)
    : number_(next_number()),
      arena_(reinterpret_cast<std::byte*>(arena)),
      arena_bytes_(arena_bytes),
      bounds_(bounds),
      has_tiles_(isa == "amx"),
      adapters_(bounds.max_tokens, bounds.max_samples, bounds.max_seqs),
      executor_(kernels_of(isa), num_threads, adapters_) {}

std::byte* BoundProgram::at(int64_t offset, int64_t size_bytes) const {
    if (offset < 0 || size_bytes < 0 || size_bytes > arena_bytes_ - offset)
        throw std::invalid_argument(std::to_string(size_bytes) + " bytes at " + std::to_string(offset) +
                                    " are not inside an arena of " + std::to_string(arena_bytes_));
    return arena_ + offset;
}

const float* BoundProgram::floats(int64_t offset, int64_t count) const {
    return reinterpret_cast<const float*>(at(offset, count * kFloat));
}

const float* BoundProgram::floats(std::optional<int64_t> offset, int64_t count) const {
    return offset ? floats(*offset, count) : nullptr;
}

Rows BoundProgram::rows(const RowsAt& rows) const {
    const RowForm form = member(rows.form, RowForm::kBF16);
    const int64_t size = rows.row_bytes * rows.num_rows;
    const int64_t narrow = form == RowForm::kF32    ? 0
                           : form == RowForm::kInt8 ? quantised_row_bytes(rows.width) * rows.num_rows
                                                    : bf16_bytes(rows.num_rows, rows.width);
    if (form != RowForm::kF32 && (rows.width % kGroup != 0 || narrow > size))
        throw std::invalid_argument(std::to_string(rows.num_rows) + " rows of " + std::to_string(rows.width) +
                                    " elements cannot be narrowed in place");
    return {at(rows.offset, size), rows.row_bytes, rows.width, form, rows.per_sample};
}

Rows BoundProgram::rows(const std::optional<RowsAt>& rows) const { return rows ? this->rows(*rows) : Rows{}; }

Weight BoundProgram::weight(const WeightAt& weight) const {
    Weight made{.parts = {}, .num_rows = weight.num_rows, .num_columns = weight.num_columns};
    for (const PartAt& part : weight.parts) {
        const Format format = member(part.format, Format::kInt4);
        const int64_t size = part_bytes(format, part.group_size, part.num_rows, weight.num_columns);
        made.parts.push_back({format, part.group_size, part.num_rows, at(part.offset, size)});
    }
    return made;
}

std::vector<Weight> BoundProgram::weights(const std::vector<WeightAt>& weights) const {
    std::vector<Weight> made;
    for (const WeightAt& weight : weights) made.push_back(this->weight(weight));
    return made;
}

KVPages BoundProgram::pages(const PagesAt& pages) const {
    std::byte* data = at(pages.offset, pages.page_bytes * bounds_.num_pages);
    return {data, pages.page_bytes, pages.layer_bytes, pages.page_size, member(pages.type, KVType::kInt8)};
}

LinearOp BoundProgram::linear(const RowsAt& x, const RowsAt& out, const WeightAt& weight, std::optional<int64_t> bias,
                              int32_t products, BytesAt scratch) const {
    LinearOp op{rows(x), rows(out), this->weight(weight), floats(bias, weight.num_rows),
                member(products, Products::kBF16x3), at(scratch), scratch.size_bytes};
    const bool is_packed =
        std::ranges::all_of(op.weight.parts, [](const Part& part) { return is_quantised(part.format); });
    const bool is_float =
        std::ranges::none_of(op.weight.parts, [](const Part& part) { return is_quantised(part.format); });
    const bool is_narrow = op.products == Products::kInt8 || op.products == Products::kBF16;
    if (is_narrow && !is_packed)
        throw std::invalid_argument("products are float32 where a part of the matrix is not quantised");
    if (op.products == Products::kBF16x3 && !(is_float && x.width % kGroup == 0))
        throw std::invalid_argument("products of three parts are for matrices of floats with whole groups of columns");
    if ((op.products == Products::kBF16 || op.products == Products::kBF16x3) && !has_tiles_)
        throw std::invalid_argument("products in bfloat16 need matrix tiles: the set `amx`");
    const bool rounds = op.products == Products::kBF16 && op.x.form == RowForm::kF32;
    if (rounds && scratch.size_bytes < bf16_bytes(x.num_rows, x.width))
        throw std::invalid_argument("no room in scratch for " + std::to_string(x.num_rows) + " rows in bfloat16");
    if (op.products == Products::kBF16x3 && scratch.size_bytes < bf16x3_bytes(x.num_rows, x.width))
        throw std::invalid_argument("no room in scratch for three parts of " + std::to_string(x.num_rows) + " rows");
    if (op.x.form != RowForm::kF32 && static_cast<int>(op.x.form) != static_cast<int>(op.products))
        throw std::invalid_argument("rows are narrowed for other products");
    return op;
}

// Of adapters, for an op with so many rows.
Rows BoundProgram::sums(const std::optional<RowsAt>& sums, int32_t num_rows) const {
    if (sums && sums->num_rows < num_rows) throw std::invalid_argument("sums of adapters for too few rows");
    return rows(sums);
}

void BoundProgram::add_embed(RowsAt out, const WeightAt& table, float scale, std::optional<int64_t> position_table,
                             std::optional<RowsAt> sums) {
    const float* positions = floats(position_table, int64_t{bounds_.max_positions} * out.width);
    executor_.add(EmbedOp{rows(out), weight(table), scale, positions, this->sums(sums, out.num_rows)});
}

void BoundProgram::add_norm(RowsAt x, RowsAt out, std::optional<RowsAt> residual, int64_t weight,
                            std::optional<int64_t> bias, int32_t kind, float eps) {
    const NormKind known = member(kind, NormKind::kLayer);
    executor_.add(NormOp{rows(x), rows(out), rows(residual), floats(weight, x.width), floats(bias, x.width), known, eps});
}

void BoundProgram::add_head_norm(RowsAt qkv, int64_t q_weight, int64_t k_weight, HeadShape heads, float eps) {
    const float *q = floats(q_weight, heads.head_dim), *k = floats(k_weight, heads.head_dim);
    executor_.add(HeadNormOp{rows(qkv), q, k, heads, eps});
}

void BoundProgram::add_rope(RowsAt qkv, HeadShape heads, std::vector<float> inv_freq, float attention_factor) {
    executor_.add(RopeOp{rows(qkv), heads, std::move(inv_freq), attention_factor});
}

void BoundProgram::add_write_kv(RowsAt qkv, HeadShape heads, int32_t group, int32_t layer_slot, const PagesAt& pages) {
    executor_.add(WriteKVOp{rows(qkv), heads, group, layer_slot, this->pages(pages)});
}

void BoundProgram::add_attention(RowsAt qkv, RowsAt out, HeadShape heads, int32_t group, int32_t layer_slot,
                                 float scale, int32_t window, float softcap, bool is_exact, const PagesAt& pages,
                                 BytesAt scratch) {
    executor_.add(AttentionOp{rows(qkv), rows(out), heads, group, layer_slot, scale, window, softcap, is_exact,
                              this->pages(pages), at(scratch), scratch.size_bytes});
}

void BoundProgram::add_gated_activation(RowsAt x, RowsAt out, int32_t activation, bool may_fuse) {
    const GatedActivationOp op{rows(x), rows(out), member(activation, Activation::kGelu)};
    may_fuse ? executor_.add_to_linear(op) : executor_.add(op);
}

void BoundProgram::add_activate(RowsAt x, RowsAt out, int32_t activation) {
    executor_.add(ActivateOp{rows(x), rows(out), member(activation, Activation::kGelu)});
}

void BoundProgram::add_gather(RowsAt x, RowsAt out) {
    executor_.add(GatherOp{rows(x), rows(out)});
}

void BoundProgram::add_linear(RowsAt x, RowsAt out, const WeightAt& weight, std::optional<int64_t> bias,
                              int32_t products, BytesAt scratch, std::optional<RowsAt> sums) {
    LinearOp op = linear(x, out, weight, bias, products, scratch);
    op.sums = this->sums(sums, x.num_rows);
    executor_.add(std::move(op));
}

void BoundProgram::add_route(RowsAt x, RowsAt ids, RowsAt shares, const WeightAt& weight, int32_t top_k, bool normalise,
                             BytesAt scratch) {
    executor_.add(RouteOp{rows(x), rows(ids), rows(shares), this->weight(weight), top_k, normalise, at(scratch),
                          scratch.size_bytes});
}

void BoundProgram::add_experts(RowsAt x, RowsAt ids, RowsAt shares, RowsAt out, const std::vector<WeightAt>& gate_up,
                               const std::vector<WeightAt>& down, int32_t activation, int32_t top_k, BytesAt scratch) {
    executor_.add(ExpertsOp{rows(x), rows(ids), rows(shares), rows(out), weights(gate_up), weights(down),
                            member(activation, Activation::kGelu), top_k, at(scratch),
                            scratch.size_bytes});
}

void BoundProgram::add_logits(RowsAt x, RowsAt out, const WeightAt& weight, std::optional<int64_t> bias, float scale,
                              float softcap, int32_t products, BytesAt scratch, RowsAt summaries,
                              std::optional<RowsAt> sums) {
    LogitsOp op{linear(x, out, weight, bias, products, scratch), scale, softcap, rows(summaries)};
    op.linear.sums = this->sums(sums, x.num_rows);
    executor_.add(std::move(op));
}

void BoundProgram::add_sample(RowsAt logits, std::optional<RowsAt> summaries, BytesAt scratch) {
    executor_.add(SampleOp{rows(logits), rows(summaries), at(scratch), scratch.size_bytes});
}

void BoundProgram::check_step(const StepView& step) const {
    kvarto::check_step(step, bounds_);
    for (int32_t seq = 0; step.adapters != nullptr && seq < step.num_seqs; ++seq)
        if (step.adapters[seq] >= 0 && !adapters_.is_bound(step.adapters[seq]))
            throw std::invalid_argument("step: adapters " + std::to_string(step.adapters[seq]) + ", which is not bound");
}

void BoundProgram::run(nb::handle step, nb::handle page_tables, nb::handle slot_mapping, nb::handle result) {
    const StepArrays arrays(step, page_tables, slot_mapping, result, bounds_.num_groups);
    const nb::gil_scoped_release released;
    check_step(arrays.view());
    executor_.run(arrays.view());
}

std::vector<std::pair<int64_t, double>> BoundProgram::run_timed(nb::handle step, nb::handle page_tables,
                                                                nb::handle slot_mapping, nb::handle result) {
    const StepArrays arrays(step, page_tables, slot_mapping, result, bounds_.num_groups);
    const nb::gil_scoped_release released;
    check_step(arrays.view());
    std::vector<int64_t> ends_ns(static_cast<size_t>(executor_.num_phases()));
    executor_.run(arrays.view(), ends_ns);
    std::vector<std::pair<int64_t, double>> phases;
    int64_t start_ns = 0;
    for (size_t phase = 0; phase < ends_ns.size(); start_ns = ends_ns[phase++])
        phases.emplace_back(executor_.first_op(static_cast<int64_t>(phase)),
                            static_cast<double>(ends_ns[phase] - start_ns) / 1e9);
    return phases;
}

}  // namespace kvarto
