// The ops of a compiled program, every name resolved to an address. Mirrors kvarto/core/ops.py; one struct per op.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/rows.h"
#include "weights/format.h"

namespace kvarto {

enum class Activation : uint8_t { kSilu, kGeluTanh, kGelu };
enum class NormKind : uint8_t { kRms, kLayer };
enum class KVType : uint8_t { kF32, kF16, kBF16, kInt8 };
// In what a linear multiplies. kBF16 and kBF16x3, which is as precise as float32, are for sets with matrix tiles.
enum class Products : uint8_t { kF32, kInt8, kBF16, kBF16x3 };

struct HeadShape {
    int32_t num_qo_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
};

// Owns the parts that a Matrix points to.
struct Weight {
    std::vector<Part> parts;
    int32_t num_rows = 0;
    int32_t num_columns = 0;
    Matrix matrix() const { return {num_rows, num_columns, parts}; }
};

// page = [layer][plane][kv_head][token][dim]; int8 planes are followed by their scales, see ops/kv_page.h.
struct KVPages {
    std::byte* data = nullptr;
    int64_t page_bytes = 0;
    int64_t layer_bytes = 0;  // from one layer slot to the next
    int32_t page_size = 0;    // tokens
    KVType type = KVType::kF32;
};

struct EmbedOp {
    Rows out;
    Weight table;
    float scale = 1.0F;
    const float* position_table = nullptr;  // [max_positions, width] row-major, or null
    Rows sums{};        // of adapters, as LinearOp's
    int32_t index = 0;  // of the op; set by the executor
};

struct NormOp {
    Rows x, out;
    Rows residual;  // data null where there is none
    const float* weight = nullptr;
    const float* bias = nullptr;
    NormKind kind = NormKind::kRms;
    float eps = 0;
};

struct HeadNormOp {
    Rows qkv;
    const float* q_weight = nullptr;
    const float* k_weight = nullptr;
    HeadShape heads{};
    float eps = 0;
};

struct RopeOp {
    Rows qkv;
    HeadShape heads{};
    std::vector<float> inv_freq;
    float attention_factor = 1.0F;
};

struct WriteKVOp {
    Rows qkv;
    HeadShape heads{};
    int32_t group = 0;
    int32_t layer_slot = 0;
    KVPages pages;
};

struct AttentionOp {
    Rows qkv, out;
    HeadShape heads{};
    int32_t group = 0;
    int32_t layer_slot = 0;
    float scale = 1.0F;
    int32_t window = 0;   // 0: none
    float softcap = 0.0F; // 0: none
    bool exact = true;    // float32 throughout; false lets the machine's 16-bit products be used
    KVPages pages;
    std::byte* scratch = nullptr;
    int64_t scratch_bytes = 0;
};

inline constexpr int32_t kFewestGatedRows = 3;

struct GatedActivationOp {
    Rows x, out;
    Activation activation = Activation::kSilu;
    // The linear before it did it, where there are kFewestGatedRows and no adapter updates what that writes.
    bool is_fused = false;
    int32_t linear = 0;  // index of that op
};

struct ActivateOp {
    Rows x, out;
    Activation activation = Activation::kSilu;
};

struct GatherOp {
    Rows x, out;
};

struct LinearOp {
    Rows x, out;
    Weight weight;
    const float* bias = nullptr;
    Products products = Products::kF32;
    std::byte* scratch = nullptr;  // rows of x as products want them, where they are not
    int64_t scratch_bytes = 0;
    // Where `out` holds gates and what they gate and nothing else reads it: the activation's output, bfloat16. From
    // kFewestGatedRows rows on it is written instead of `out`, which would leave the cache in between.
    Rows gated{};  // data null where there is none
    Activation activation = Activation::kSilu;
    Rows sums{};        // of adapters, see ops/adapter_product.h; data null where none are planned for
    int32_t index = 0;  // of the op; set by the executor
};

struct RouteOp {
    Rows x, ids, shares;
    Weight weight;
    int32_t top_k = 0;
    bool normalise = false;
    std::byte* scratch = nullptr;
    int64_t scratch_bytes = 0;
};

struct ExpertsOp {
    Rows x, ids, shares, out;
    std::vector<Weight> gate_up;  // per expert [2 * ffn, hidden]
    std::vector<Weight> down;     // per expert [hidden, ffn]
    Activation activation = Activation::kSilu;
    int32_t top_k = 0;
    std::byte* scratch = nullptr;
    int64_t scratch_bytes = 0;
};

struct LogitsOp {
    LinearOp linear;  // x per sample, out [num_samples, vocab_size]; the weight has one part
    float scale = 1.0F;
    float softcap = 0.0F;  // 0: none
    Rows summaries;        // [num_samples] rows of ChunkSummary (ops/logits_summary.h); data null where nobody reads them
};

struct SampleOp {
    Rows logits;
    Rows summaries;  // as Logits left them; data null: made here
    std::byte* scratch = nullptr;
    int64_t scratch_bytes = 0;
};

}  // namespace kvarto
