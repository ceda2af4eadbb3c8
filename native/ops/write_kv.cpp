// WriteKV: the k and v heads of each row go to the row's slot in the pages.
//
// Cost: two heads' worth of elements read, converted and written per kv head; bound by the writes, which are a small
// share of the step. A row writes its own slot alone, so rows may go to any thread.
#include "ops/write_kv.h"

#include <algorithm>

#include "ops/kv_page.h"

namespace kvarto::KVARTO_ISA {

namespace {

// A head's elements, zeros behind them up to a multiple of 16.
struct PaddedHead {
    alignas(64) float values[kMaxHeadDim];
    int32_t num_vectors;

    PaddedHead(const float* head, int32_t head_dim) : num_vectors((head_dim + 15) / 16) {
        std::copy_n(head, head_dim, values);
        std::fill(values + head_dim, values + num_vectors * 16, 0.0F);
    }
    F32x16 vector(int32_t i) const { return F32x16::load(values + 16 * i); }
};

// Codes and scale of one head. Where an element is NaN or infinite the scale becomes NaN, and so does the whole head.
float write_codes(const PaddedHead& head, int8_t* codes) {
    F32x16 largest_lanes = F32x16::zero(), nothing = F32x16::zero();
    for (int32_t i = 0; i < head.num_vectors; ++i) {
        largest_lanes = max(abs(head.vector(i)), largest_lanes);
        nothing = nothing + head.vector(i) * F32x16::zero();  // 0, or NaN
    }
    const float most = largest(largest_lanes);
    const F32x16 inverse = F32x16::set1(most > 0 ? 127.0F / most : 0.0F);
    const F32x16 limit = F32x16::set1(127.0F), lower_limit = F32x16::set1(-127.0F);
    for (int32_t i = 0; i < head.num_vectors; ++i)
        store_i8(to_i32(max(min(head.vector(i) * inverse, limit), lower_limit)), codes + 16 * i);
    return most / 127.0F + sum(nothing);
}

template <KVType kType> void write_head(const PaddedHead& head, int32_t head_dim, std::byte* token, float* scale) {
    alignas(64) std::byte narrow[kMaxHeadDim * 4];
    for (int32_t i = 0; i < head.num_vectors; ++i) {
        std::byte* p = narrow + 16 * i * element_bytes(kType);
        if constexpr (kType == KVType::kF32) head.vector(i).store(reinterpret_cast<float*>(p));
        if constexpr (kType == KVType::kF16) head.vector(i).store_f16(reinterpret_cast<uint16_t*>(p));
        if constexpr (kType == KVType::kBF16) store_bf16(head.vector(i), reinterpret_cast<uint16_t*>(p));
    }
    if constexpr (kType == KVType::kInt8) *scale = write_codes(head, reinterpret_cast<int8_t*>(narrow));
    std::memcpy(token, narrow, static_cast<size_t>(head_dim * element_bytes(kType)));
}

template <KVType kType> void write_rows(const WriteKVOp& op, const StepView& step, int64_t first_row, int64_t last_row) {
    const LayerPages pages(op.pages, op.layer_slot, op.heads);
    const int32_t head_dim = op.heads.head_dim, num_kv_heads = op.heads.num_kv_heads;
    const int64_t* slots = step.slot_mapping + int64_t{op.group} * step.num_tokens;
    for (int64_t row = first_row; row < last_row; ++row) {
        const int64_t page = slots[row] / pages.page_size;
        const auto offset = static_cast<int32_t>(slots[row] % pages.page_size);
        const float* head = op.qkv.f32(row) + op.heads.num_qo_heads * head_dim;
        for (const Plane which : {Plane::kKey, Plane::kValue})
            for (int32_t h = 0; h < num_kv_heads; ++h, head += head_dim) {
                const HeadPlane plane = pages.plane(page, h, which);
                write_head<kType>(PaddedHead(head, head_dim), head_dim, plane.token(offset, pages.token_bytes),
                                  plane.scales + (kType == KVType::kInt8 ? offset : 0));
            }
    }
}

}  // namespace

void write_kv(const WriteKVOp& op, const StepView& step, int64_t first_row, int64_t last_row) {
    switch (op.pages.type) {
        case KVType::kF32: return write_rows<KVType::kF32>(op, step, first_row, last_row);
        case KVType::kF16: return write_rows<KVType::kF16>(op, step, first_row, last_row);
        case KVType::kBF16: return write_rows<KVType::kBF16>(op, step, first_row, last_row);
        case KVType::kInt8: return write_rows<KVType::kInt8>(op, step, first_row, last_row);
    }
}

}  // namespace kvarto::KVARTO_ISA
