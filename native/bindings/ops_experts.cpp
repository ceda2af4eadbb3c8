// Sizes of routing and experts, which the plan needs before there is memory.
#include <nanobind/nanobind.h>

#define KVARTO_ISA portable  // the sizes are the same for every instruction set
#include "ops/experts.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

void bind_ops_experts(nb::module_& ops) {
    ops.def("route_scratch_bytes", &route_scratch_bytes, "num_rows"_a, "num_experts"_a);
    ops.def("experts_scratch_bytes", &experts_scratch_bytes, "num_rows"_a, "top_k"_a, "num_experts"_a, "hidden"_a,
            "ffn"_a);
}

}  // namespace kvarto
