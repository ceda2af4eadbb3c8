// kvarto.core._native: one submodule per room, each bound by a file of its own.
#include <nanobind/nanobind.h>

namespace kvarto {

void bind_adapters(nanobind::module_& adapters);
void bind_memory(nanobind::module_& memory);
void bind_ops(nanobind::module_& ops);
void bind_ops_attention(nanobind::module_& ops);
void bind_ops_experts(nanobind::module_& ops);
void bind_ops_linear(nanobind::module_& ops);
void bind_ops_sample(nanobind::module_& ops);
void bind_ops_threads(nanobind::module_& ops);
void bind_planning(nanobind::module_& planning);
void bind_weights(nanobind::module_& weights);

}  // namespace kvarto

NB_MODULE(_native, module) {
    nanobind::set_leak_warnings(false);  // an engine's objects live as long as its process, and no collection sees them
    module.doc() = "Kvarto's native code: one submodule per room.";
    auto adapters = module.def_submodule("adapters", "From files of adapters to the bytes of their pages.");
    kvarto::bind_adapters(adapters);
    auto memory = module.def_submodule("memory", "Which pages are free, and who keeps the others.");
    kvarto::bind_memory(memory);
    auto ops = module.def_submodule("ops", "Instruction sets, kernels and compiled programs.");
    kvarto::bind_ops(ops);
    kvarto::bind_ops_attention(ops);
    kvarto::bind_ops_experts(ops);
    kvarto::bind_ops_linear(ops);
    kvarto::bind_ops_sample(ops);
    kvarto::bind_ops_threads(ops);
    auto planning = module.def_submodule("planning", "Searches that take the planner's numbers.");
    kvarto::bind_planning(planning);
    auto weights = module.def_submodule("weights", "Formats of matrices and their repacking.");
    kvarto::bind_weights(weights);
}
