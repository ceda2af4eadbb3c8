// Lanes go side by side: lane k of L sums blocks k, k + L, k + 2L … with powers of h^L, a group of vectors at a time
// and reduced once for each. What a lane has before a group joins the group's first block. Only in the last group do
// powers differ by lane, so that the sum of the lanes is the hash:
//
//   groups before the last:  h^8L … h^2L h^L, the same in each lane;     the last:  h^(8L-k) … h^(2L-k) h^(L-k)
#include "ops/page_hash.h"

#if defined(__PCLMUL__)

#include "simd/polyval.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int kGroup = 8;  // vectors: as many powers stay in registers
constexpr int64_t kVecBytes = kFieldLanes * kPageHashBytes;
constexpr int64_t kLine = 64, kAhead = 4096;  // bytes: the processor's own prefetching ends with each small page
static_assert(kHashedBytes % kVecBytes == 0);

__m128i load_block(const std::byte* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
void store_block(std::byte* to, __m128i block) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), block); }

// Powers of the point, for a group's vectors from its last one on.
class Powers {
public:
    explicit Powers(const std::byte* point) {
        const __m128i h = load_block(point);
        alignas(64) std::byte powers[kGroup * kFieldLanes][kPageHashBytes];  // h, h^2 …
        __m128i power = h;
        for (std::byte* place : powers) {
            store_block(place, power);
            power = multiply(power, h);
        }
        alignas(64) std::byte lanes[kFieldLanes][kPageHashBytes];
        for (int i = 0; i < kGroup; ++i) {
            const int top = (i + 1) * kFieldLanes - 1;
            for (std::byte* lane : lanes) store_block(lane, load_block(powers[top]));
            middle[i] = field_load(lanes[0]);
            for (int lane = 0; lane < kFieldLanes; ++lane) store_block(lanes[lane], load_block(powers[top - lane]));
            last[i] = field_load(lanes[0]);
        }
    }

    FieldVec middle[kGroup], last[kGroup];

private:
    static __m128i multiply(__m128i a, __m128i b) {
        alignas(64) std::byte of_a[kFieldLanes][kPageHashBytes] = {}, of_b[kFieldLanes][kPageHashBytes] = {};
        store_block(of_a[0], a);
        store_block(of_b[0], b);
        FieldSum product;
        product.add_product(field_load(of_a[0]), field_load(of_b[0]));
        return sum_of_lanes(product.reduced());
    }
};

[[gnu::always_inline]] inline FieldVec add_group(FieldVec sum, const std::byte* from, const FieldVec* powers,
                                                 int count) {
    for (int64_t line = 0; line < count * kVecBytes; line += kLine) __builtin_prefetch(from + kAhead + line, 0, 2);
    FieldSum products;
    for (int i = 1; i < count; ++i) products.add_product(field_load(from + i * kVecBytes), powers[count - 1 - i]);
    products.add_product(field_add(sum, field_load(from)), powers[count - 1]);  // last: the others need not wait for it
    return products.reduced();
}

// The first group is what does not fill one, so that all others are whole.
__m128i hash_of(const Powers& powers, const std::byte* page, int64_t page_bytes) {
    const std::byte* const end = page + page_bytes;
    const int first = static_cast<int>((page_bytes / kVecBytes - 1) % kGroup + 1);
    const bool is_only = page_bytes == first * kVecBytes;
    FieldVec sum = add_group(field_zero(), page, is_only ? powers.last : powers.middle, first);
    if (is_only) return sum_of_lanes(sum);
    constexpr int64_t kGroupBytes = kGroup * kVecBytes;
    for (page += first * kVecBytes; page < end - kGroupBytes; page += kGroupBytes)
        sum = add_group(sum, page, powers.middle, kGroup);
    return sum_of_lanes(add_group(sum, page, powers.last, kGroup));
}

}  // namespace

void hash_pages(const std::byte* point, const std::byte* region, std::span<const int32_t> pages, int64_t page_bytes,
                std::byte* hashes) {
    const Powers powers(point);
    for (const int32_t page : pages) {
        store_block(hashes, hash_of(powers, region + page * page_bytes, page_bytes));
        hashes += kPageHashBytes;
    }
}

}  // namespace kvarto::KVARTO_ISA

#endif
