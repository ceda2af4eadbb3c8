// Attention's sizes, which the plan needs before there is memory.
#define KVARTO_ISA portable  // the sizes are the same for every instruction set
#include "ops/attention.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

namespace {

int64_t scratch_bytes(const HeadShape& heads, int64_t max_tokens, int64_t max_seqs, int64_t max_context,
                      int32_t num_threads) {
    return portable::attention_scratch_bytes(heads, {max_tokens, max_seqs, max_context}, num_threads);
}

}  // namespace

void bind_ops_attention(nb::module_& ops) {
    ops.def("attention_scratch_bytes", &scratch_bytes, "heads"_a, "max_tokens"_a, "max_seqs"_a, "max_context"_a,
            "num_threads"_a, "Bytes of an attention's scratch, enough for every step within the limits.");
}

}  // namespace kvarto
