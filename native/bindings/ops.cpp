// kvarto.core._native.ops
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bound_program.h"
#include "core/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

void bind_ops_attention(nb::module_& ops);

namespace {

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
}

void bind_places(nb::module_& ops) {
    nb::class_<RowsAt>(ops, "Rows")
        .def(nb::init<int64_t, int64_t, int32_t, int32_t, int32_t, bool>(), "offset"_a, "row_bytes"_a, "width"_a,
             "num_rows"_a, "form"_a = 0, "per_sample"_a = false);
    nb::class_<PartAt>(ops, "Part")
        .def(nb::init<int32_t, int32_t, int32_t, int64_t>(), "format"_a, "group_size"_a, "num_rows"_a, "offset"_a);
    nb::class_<WeightAt>(ops, "Weight")
        .def(nb::init<int32_t, int32_t, std::vector<PartAt>>(), "num_rows"_a, "num_columns"_a, "parts"_a);
    nb::class_<BytesAt>(ops, "Bytes").def(nb::init<int64_t, int64_t>(), "offset"_a, "size_bytes"_a);
    nb::class_<PagesAt>(ops, "Pages")
        .def(nb::init<int64_t, int64_t, int64_t, int32_t, int32_t>(), "offset"_a, "page_bytes"_a, "layer_bytes"_a,
             "page_size"_a, "type"_a);
    nb::class_<HeadShape>(ops, "Heads")
        .def(nb::init<int32_t, int32_t, int32_t>(), "num_qo_heads"_a, "num_kv_heads"_a, "head_dim"_a);
    nb::class_<StepBounds>(ops, "StepBounds")
        .def(nb::init<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t>(), "max_tokens"_a,
             "max_seqs"_a, "max_samples"_a, "max_positions"_a, "vocab_size"_a, "num_groups"_a, "num_pages"_a,
             "page_size"_a);
}

void bind_program(nb::module_& ops) {
    using P = BoundProgram;
    nb::class_<P>(ops, "Program", "Ops over an arena that the caller keeps; offsets are checked, addresses are not.")
        .def(nb::init<const std::string&, int32_t, uintptr_t, int64_t, StepBounds>(), "isa"_a, "num_threads"_a,
             "arena"_a, "arena_bytes"_a, "bounds"_a)
        .def("add_embed", &P::add_embed, "out"_a, "table"_a, "scale"_a, "position_table"_a.none(),
             "sums"_a.none() = nb::none())
        .def("add_norm", &P::add_norm, "x"_a, "out"_a, "residual"_a.none(), "weight"_a, "bias"_a.none(), "kind"_a,
             "eps"_a)
        .def("add_head_norm", &P::add_head_norm, "qkv"_a, "q_weight"_a, "k_weight"_a, "heads"_a, "eps"_a)
        .def("add_rope", &P::add_rope, "qkv"_a, "heads"_a, "inv_freq"_a, "attention_factor"_a)
        .def("add_write_kv", &P::add_write_kv, "qkv"_a, "heads"_a, "group"_a, "layer_slot"_a, "pages"_a)
        .def("add_attention", &P::add_attention, "qkv"_a, "out"_a, "heads"_a, "group"_a, "layer_slot"_a, "scale"_a,
             "window"_a, "softcap"_a, "is_exact"_a, "pages"_a, "scratch"_a)
        .def("add_gated_activation", &P::add_gated_activation, "x"_a, "out"_a, "activation"_a, "may_fuse"_a = false)
        .def("add_activate", &P::add_activate, "x"_a, "out"_a, "activation"_a)
        .def("add_gather", &P::add_gather, "x"_a, "out"_a)
        .def("add_linear", &P::add_linear, "x"_a, "out"_a, "weight"_a, "bias"_a.none(), "products"_a, "scratch"_a,
             "sums"_a.none() = nb::none())
        .def("add_route", &P::add_route, "x"_a, "ids"_a, "shares"_a, "weight"_a, "top_k"_a, "normalise"_a, "scratch"_a)
        .def("add_experts", &P::add_experts, "x"_a, "ids"_a, "shares"_a, "out"_a, "gate_up"_a, "down"_a,
             "activation"_a, "top_k"_a, "scratch"_a)
        .def("add_logits", &P::add_logits, "x"_a, "out"_a, "weight"_a, "bias"_a.none(), "scale"_a, "softcap"_a,
             "products"_a, "scratch"_a, "summaries"_a, "sums"_a.none() = nb::none())
        .def("add_sample", &P::add_sample, "logits"_a, "summaries"_a.none(), "scratch"_a)
        .def("adapter_shape", &P::adapter_shape, "updates"_a, "tokens"_a,
             "What adapters of one shape have in common. Raises ValueError where it does not fit the program.")
        .def("bind_adapter", &P::bind_adapter, "handle"_a, "pool"_a, "pages"_a, "shape"_a,
             "Let steps name an adapter whose bytes are in these pages. Raises ValueError where they are too few.")
        .def("unbind_adapter", &P::unbind_adapter, "handle"_a)
        .def("run", &P::run, "step"_a, "page_tables"_a, "slot_mapping"_a, "result"_a,
             "One pass. Raises ValueError where the step does not fit, before anything is computed.")
        .def("run_timed", &P::run_timed, "step"_a, "page_tables"_a, "slot_mapping"_a, "result"_a,
             "One pass, measured: for each phase the index of its first op, and seconds.")
        .def_prop_ro("num_phases", &P::num_phases, "Phases of a step, each but the last followed by a barrier.");
}

void bind_shapes(nb::module_& ops) {
    nb::class_<AdapterShape>(ops, "AdapterShape", "Updates and tokens that were checked against a program.");
    nb::class_<StripsAt>(ops, "Strips")
        .def(nb::init<int64_t, int32_t, int32_t, int32_t>(), "start"_a, "num_strips"_a, "num_columns"_a, "type"_a);
    nb::class_<UpdateAt>(ops, "Update")
        .def(nb::init<int32_t, int32_t, float, StripsAt, StripsAt, std::optional<StripsAt>, std::optional<StripsAt>>(),
             "op"_a, "first_row"_a, "scaling"_a, "a"_a, "b"_a, "bias"_a.none(), "magnitude"_a.none());
    nb::class_<TokensAt>(ops, "Tokens")
        .def(nb::init<int32_t, StripsAt, std::vector<int32_t>>(), "op"_a, "rows"_a, "token_ids"_a);
}

}  // namespace

void bind_ops(nb::module_& ops) {
    ops.def("isas", &isas, "Instruction sets that can run here, the best one last.");
    bind_places(ops);
    bind_shapes(ops);
    bind_program(ops);
    bind_ops_attention(ops);
}

}  // namespace kvarto
