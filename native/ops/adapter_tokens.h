// Rows of tokens that an adapter replaces, of the embedding and of the output matrix.
#pragma once

#include "core/adapters.h"
#include "core/threads.h"

namespace kvarto::KVARTO_ISA {

// Both are entered by all workers, in a phase of their own.

// out[row] = scale * (the row that stands for its token) + bias, where one does.
void adapter_embeddings(const AdapterWork& work, Worker& worker);
// out[row, token] = x[row] · (the token's row) + bias, for tokens that are replaced; sums as in adapter_product.h.
void adapter_logits(const AdapterWork& work, Worker& worker);

}  // namespace kvarto::KVARTO_ISA
