#include "core/isa.h"

#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvarto {

namespace portable {
const Kernels& kernels();
}

#if defined(__x86_64__)

namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512_bf16 {
const Kernels& kernels();
}
namespace amx {
const Kernels& kernels();
}
namespace vpclmul {
void hash_pages(const std::byte* point, const std::byte* region, std::span<const int32_t> pages, int64_t page_bytes,
                std::byte* hashes);
}

namespace {

struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

constexpr bool has_bits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

constexpr uint64_t bit(int index) { return uint64_t{1} << index; }

// The register states that the operating system saves, XCR0. 0 where it saves none.
uint64_t saved_states() {
    if (!has_bits(cpuid(1, 0).ecx, bit(27))) return 0;  // OSXSAVE
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t{high} << 32 | low;
}

bool has_avx2() {
    constexpr uint64_t kPclmul = bit(1), kFma = bit(12), kF16c = bit(29), kAvx2 = bit(5), kSseAvxStates = 0x6;
    return has_bits(cpuid(1, 0).ecx, kPclmul | kFma | kF16c) && has_bits(cpuid(7, 0).ebx, kAvx2) &&
           has_bits(saved_states(), kSseAvxStates);
}

bool has_avx512() {
    constexpr uint64_t kF = bit(16), kDq = bit(17), kBw = bit(30), kVl = bit(31), kVnni = bit(11), kStates = 0xE6;
    const Registers leaf7 = cpuid(7, 0);
    return has_bits(leaf7.ebx, kF | kDq | kBw | kVl) && has_bits(leaf7.ecx, kVnni) && has_bits(saved_states(), kStates);
}

bool has_vpclmul() { return has_bits(cpuid(7, 0).ecx, bit(10)); }

// Tiles are 8 KiB of state per thread that a process must ask for. The permission holds for threads made later.
bool may_use_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_avx512_bf16() { return has_bits(cpuid(7, 1).eax, bit(5)) && has_vpclmul(); }

bool has_amx() {
    constexpr uint64_t kBf16 = bit(22), kTile = bit(24), kInt8 = bit(25), kTileStates = bit(17) | bit(18);
    return has_bits(cpuid(7, 0).edx, kBf16 | kTile | kInt8) && has_bits(saved_states(), kTileStates) && may_use_tiles();
}

const Kernels& avx512_kernels() {
    static const Kernels table = [] {
        Kernels kernels = avx512::kernels();
        if (has_vpclmul()) kernels.hash_pages = vpclmul::hash_pages;
        return kernels;
    }();
    return table;
}

// A build may leave sets out: see KVARTO_ISAS in CMakeLists.txt.
std::vector<const Kernels*> find_kernels() {
    std::vector<const Kernels*> found{&portable::kernels()};
    if (!has_avx2()) return found;
    if constexpr (KVARTO_HAS_avx2) found.push_back(&avx2::kernels());
    if (!has_avx512()) return found;
    if constexpr (KVARTO_HAS_avx512) found.push_back(&avx512_kernels());
    if (!has_avx512_bf16()) return found;
    if constexpr (KVARTO_HAS_avx512_bf16) found.push_back(&avx512_bf16::kernels());
    if constexpr (KVARTO_HAS_amx)
        if (has_amx()) found.push_back(&amx::kernels());
    return found;
}

}  // namespace

#else

namespace {
std::vector<const Kernels*> find_kernels() { return {&portable::kernels()}; }
}  // namespace

#endif

const std::vector<const Kernels*>& available_kernels() {
    static const std::vector<const Kernels*> kernels = find_kernels();
    return kernels;
}

const Kernels& kernels_of(std::string_view name) {
    std::string names;
    for (const Kernels* kernels : available_kernels()) {
        if (name == kernels->name) return *kernels;
        names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    }
    throw std::invalid_argument("instruction set `" + std::string(name) + "` cannot run here; these can: " + names);
}

}  // namespace kvarto
