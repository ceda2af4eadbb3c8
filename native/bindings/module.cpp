// kvarto.core._native: one submodule per room, each bound by a file of its own.
#include <nanobind/nanobind.h>

namespace kvarto {

void bind_ops(nanobind::module_& ops);

}  // namespace kvarto

NB_MODULE(_native, module) {
    module.doc() = "Kvarto's native code: one submodule per room.";
    auto ops = module.def_submodule("ops", "Instruction sets, kernels and compiled programs.");
    kvarto::bind_ops(ops);
}
