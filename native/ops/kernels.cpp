// The table of this instruction set's kernels.
#include "core/kernels.h"

#define KVARTO_STRING(name) KVARTO_NAME(name)
#define KVARTO_NAME(name) #name

namespace kvarto::KVARTO_ISA {

const Kernels& kernels() {
    static const Kernels table{
        .name = KVARTO_STRING(KVARTO_ISA),
        .embed = nullptr,
        .norm = nullptr,
        .head_norm = nullptr,
        .rope = nullptr,
        .write_kv = nullptr,
        .gated_activation = nullptr,
        .activate = nullptr,
        .gather = nullptr,
        .linear = nullptr,
        .attention = nullptr,
        .route = nullptr,
        .experts = nullptr,
        .logits = nullptr,
        .sample = nullptr,
    };
    return table;
}

}  // namespace kvarto::KVARTO_ISA
