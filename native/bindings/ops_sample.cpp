// Sizes of logits and sampling, which the plan needs before there is memory.
#include <nanobind/nanobind.h>

#define KVARTO_ISA portable  // the sizes are the same for every instruction set
#include "ops/sample_scratch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

void bind_ops_sample(nb::module_& ops) {
    ops.def("sample_scratch_bytes", &sample_scratch_bytes, "vocab_size"_a, "num_threads"_a,
            "Bytes of sampling's scratch.");
    ops.def("summary_row_bytes", &summary_row_bytes, "vocab_size"_a,
            "Bytes of what Logits leaves beside a row, for sampling.");
}

}  // namespace kvarto
