// The table of this instruction set's kernels.
#include "core/kernels.h"

#include "ops/adapter_product.h"
#include "ops/adapter_tokens.h"
#include "ops/attention.h"
#include "ops/experts.h"
#include "ops/linear.h"
#include "ops/logits.h"
#include "ops/pack_values.h"
#include "ops/page_hash.h"
#include "ops/row_ops.h"
#include "ops/sample.h"
#include "ops/strip_codes.h"
#include "ops/write_kv.h"

#define KVARTO_STRING(name) KVARTO_NAME(name)
#define KVARTO_NAME(name) #name

namespace kvarto::KVARTO_ISA {

const Kernels& kernels() {
    static const Kernels table{
        .name = KVARTO_STRING(KVARTO_ISA),
        .embed = embed,
        .norm = norm,
        .head_norm = head_norm,
        .rope = rope,
        .write_kv = write_kv,
        .gated_activation = gated_activation,
        .activate = activate,
        .gather = gather,
        .linear = linear,
        .attention = attention,
        .route = route,
        .experts = experts,
        .logits = logits,
        .sample = sample,
        .adapter_shrink = adapter_shrink,
        .adapter_expand = adapter_expand,
        .adapter_embeddings = adapter_embeddings,
        .adapter_logits = adapter_logits,
        .finish_logits = finish_logits,
        .pack = {.are_finite = are_finite, .copy_finite = copy_finite, .transpose = transpose, .encode = encode},
        .hash_pages = kHashPages,
    };
    return table;
}

}  // namespace kvarto::KVARTO_ISA
