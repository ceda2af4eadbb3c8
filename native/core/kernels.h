// The table of kernels of one instruction set. Sources under ops/ are compiled once per set, each time in its own
// namespace kvarto::KVARTO_ISA (portable, avx2, avx512, avx512_bf16, amx); `kernels.cpp` fills the table there.
#pragma once

#include "core/adapters.h"
#include "core/ops.h"
#include "core/step.h"
#include "core/strip_type.h"
#include "core/threads.h"

#include <cstddef>
#include <span>

namespace kvarto {

constexpr int64_t kPageHashBytes = 16;
constexpr int64_t kHashedBytes = 64;  // pages that are hashed are multiples of it
using HashPages = void (*)(const std::byte* point, const std::byte* region, std::span<const int32_t> pages,
                           int64_t page_bytes, std::byte* hashes);

// A block of rows of values, aligned to nothing, of which columns are made: value (row, column) goes to the place
// `column * out_stride + row` of `out`, which is aligned to a value.
struct Transposition {
    const std::byte* in;
    int64_t num_rows, num_columns;
    int64_t item_bytes;  // 2 or 4
    std::byte* out;
    int64_t out_stride;
    bool is_read_soon;  // so that it stays in the caches
};

// What the values of an adapter's file go through; see ops/pack_values.h and ops/strip_codes.h.
struct PackKernels {
    bool (*are_finite)(StripType type, const std::byte* values, int64_t count);
    bool (*copy_finite)(StripType type, const std::byte* values, int64_t count, std::byte* out);
    void (*transpose)(const Transposition& block);
    bool (*encode)(StripType type, const float* values, int64_t num_blocks, std::byte* out);
};

// Two kinds of op. Row ops work on each row alone: consecutive ones run back to back on a few rows, without a barrier.
// Team ops are entered by all workers at once and divide their work themselves; they may use barriers inside. The
// executor puts a barrier after each team op and each run of row ops.
struct Kernels {
    const char* name;

    void (*embed)(const EmbedOp&, const StepView&, int64_t first_row, int64_t last_row);
    void (*norm)(const NormOp&, const StepView&, int64_t first_row, int64_t last_row);
    void (*head_norm)(const HeadNormOp&, const StepView&, int64_t first_row, int64_t last_row);
    void (*rope)(const RopeOp&, const StepView&, int64_t first_row, int64_t last_row);
    void (*write_kv)(const WriteKVOp&, const StepView&, int64_t first_row, int64_t last_row);
    void (*gated_activation)(const GatedActivationOp&, const StepView&, int64_t first_row, int64_t last_row);
    void (*activate)(const ActivateOp&, const StepView&, int64_t first_row, int64_t last_row);
    void (*gather)(const GatherOp&, const StepView&, int64_t first_row, int64_t last_row);

    void (*linear)(const LinearOp&, const StepView&, Worker&);
    void (*attention)(const AttentionOp&, const StepView&, Worker&);
    void (*route)(const RouteOp&, const StepView&, Worker&);
    void (*experts)(const ExpertsOp&, const StepView&, Worker&);
    void (*logits)(const LogitsOp&, const StepView&, Worker&);
    void (*sample)(const SampleOp&, const StepView&, Worker&);

    // What adapters add to what an op wrote, in two phases: the first beside the op, the second after a barrier.
    void (*adapter_shrink)(const AdapterWork&, Worker&);
    void (*adapter_expand)(const AdapterWork&, Worker&);
    // Between them, with barriers around, where adapters replace tokens.
    void (*adapter_embeddings)(const AdapterWork&, Worker&);
    void (*adapter_logits)(const AdapterWork&, Worker&);
    // What `logits` leaves undone where adapters change its sums.
    void (*finish_logits)(const LogitsOp&, const StepView&, Worker&);

    // No ops: what adapters go through on their way to pages. The hash is null where the set has no carry-less
    // multiplication; see ops/page_hash.h.
    PackKernels pack;
    HashPages hash_pages;
};

}  // namespace kvarto
