// Sizes of linears, which the plan needs before there is memory.
#include <nanobind/nanobind.h>

#define KVARTO_ISA portable  // the sizes are the same for every instruction set
#include "ops/linear_bf16x3.h"
#include "ops/linear_int8.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

void bind_ops_linear(nb::module_& ops) {
    ops.def("quantised_row_bytes", &quantised_row_bytes, "width"_a, "Bytes of one quantised row.");
    ops.def("bf16_bytes", &bf16_bytes, "num_rows"_a, "width"_a,
            "Bytes of rows in bfloat16; also of a linear's scratch where its rows are float32 and products bfloat16.");
    ops.def("bf16x3_bytes", &bf16x3_bytes, "num_rows"_a, "width"_a,
            "Bytes of a linear's scratch for products of three parts of bfloat16.");
    ops.def("linear_int8_scratch_bytes", &linear_int8_scratch_bytes, "num_rows"_a, "width"_a, "quantises"_a,
            "Bytes of a linear's scratch for int8 products of up to `num_rows` rows; `quantises` where x is float32.");
}

}  // namespace kvarto
