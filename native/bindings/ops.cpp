// kvarto.core._native.ops
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/isa.h"

namespace nb = nanobind;

namespace kvarto {

namespace {

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
}

}  // namespace

void bind_ops(nb::module_& ops) { ops.def("isas", &isas, "Instruction sets that can run here, the best one last."); }

}  // namespace kvarto
