// Selection without sorting: a histogram over the values' order, finer and finer around the place of the cut. Each of
// at most three passes costs 3 to 8 cycles per candidate, and every pass looks at fewer of them.
#include "ops/sample_candidates.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "ops/lanes.h"
#include "simd/mask16.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr int32_t kBucketBits = 11;
constexpr int32_t kBuckets = 1 << kBucketBits;

// Larger values have smaller keys; equal values (0 and -0 too) have equal ones.
uint32_t key_of(float value) {
    const auto bits = std::bit_cast<uint32_t>(value + 0.0F);
    return bits >> 31 != 0 ? bits : bits ^ 0x7FFFFFFFU;
}

// What a candidate adds towards the goal.
struct ByCount {
    static F32x16 weigh(F32x16) { return F32x16::set1(1.0F); }
};

struct ByMass {
    static F32x16 weigh(F32x16 values) { return exp(values); }
};

// The last key that is kept, and how many candidates with that very key are.
struct Cut {
    uint32_t key;
    double num_equal;
};

constexpr Cut kKeepAll{std::numeric_limits<uint32_t>::max(), std::numeric_limits<double>::infinity()};

// Keys [first, last], and what lies before them.
struct Span {
    uint32_t first;
    uint32_t last;
    double before;
    int shift() const { return std::max(0, static_cast<int>(std::bit_width(last - first)) - kBucketBits); }
};

float value_of(uint32_t key) { return std::bit_cast<float>(key >> 31 != 0 ? key : key ^ 0x7FFFFFFFU); }

// The last vector is filled up with a value that is there.
Span whole_span(Candidates& candidates) {
    F32x16 most = F32x16::set1(candidates.values[0]), least = most;
    most.store(candidates.values + candidates.count);
    for (int32_t i = 0; i < candidates.count; i += kWide) {
        const F32x16 values = F32x16::load(candidates.values + i);
        most = max(values, most);
        least = min(values, least);
    }
    return {key_of(largest(most)), key_of(-largest(F32x16::zero() - least)), 0.0};
}

template <class Weight> void fill(const Candidates& candidates, const Span& span, double (&buckets)[kBuckets]) {
    std::memset(buckets, 0, sizeof buckets);
    const int shift = span.shift();
    const F32x16 most = F32x16::set1(value_of(span.first)), least = F32x16::set1(value_of(span.last));
    for (int32_t i = 0; i < candidates.count; i += kWide) {
        const F32x16 values = F32x16::load(candidates.values + i);
        const int32_t count = std::min(kWide, candidates.count - i);
        uint32_t lanes = at_least(most, values) & at_least(values, least) & ((1U << count) - 1U);
        if (lanes == 0) continue;
        float weights[kWide];
        Weight::weigh(values).store(weights);
        for (; lanes != 0; lanes &= lanes - 1) {
            const int lane = std::countr_zero(lanes);
            const uint32_t bucket = (key_of(candidates.values[i + lane]) - span.first) >> shift;
            buckets[bucket] += static_cast<double>(weights[lane]);
        }
    }
}

// The first bucket with which the goal is reached; adds what lies before it to `before`. kBuckets where none is.
int32_t reaching(const double (&buckets)[kBuckets], double goal, double& before) {
    double sum = before;
    for (int32_t i = 0; i < kBuckets; ++i) {
        if (buckets[i] == 0.0) continue;
        if (sum + buckets[i] >= goal) {
            before = sum;
            return i;
        }
        sum += buckets[i];
    }
    return kBuckets;
}

template <class Weight> Cut find_cut(Candidates& candidates, double goal) {
    double buckets[kBuckets];
    for (Span span = whole_span(candidates);;) {
        fill<Weight>(candidates, span, buckets);
        const int32_t bucket = reaching(buckets, goal, span.before);
        if (bucket == kBuckets) return kKeepAll;
        const int shift = span.shift();
        span.first += static_cast<uint32_t>(bucket) << shift;
        if (shift == 0) {
            float weight[kWide];
            Weight::weigh(F32x16::set1(value_of(span.first))).store(weight);
            return {span.first, std::max(1.0, std::ceil((goal - span.before) / weight[0]))};
        }
        span.last = std::min(span.last, span.first + ((1U << shift) - 1));
    }
}

void keep(const Cut& cut, Candidates& candidates) {
    double num_equal = 0.0;
    int32_t kept = 0;
    for (int32_t i = 0; i < candidates.count; ++i) {
        const uint32_t key = key_of(candidates.values[i]);
        if (key > cut.key || (key == cut.key && ++num_equal > cut.num_equal)) continue;
        candidates.ids[kept] = candidates.ids[i];
        candidates.values[kept++] = candidates.values[i];
    }
    candidates.count = kept;
}

double mass_of(const Candidates& candidates) {
    double total = 0.0;
    each_vector(candidates.count, [&](int32_t i, int32_t here) {
        float weights[kWide];
        exp(load_first(candidates.values + i, here)).store(weights);
        for (int32_t lane = 0; lane < here; ++lane) total += static_cast<double>(weights[lane]);
    });
    return total;
}

}  // namespace

void collect(const LogitsRow& row, float least, Candidates& candidates) {
    candidates.count = 0;
    const F32x16 bound = F32x16::set1(least);
    for (int32_t first = 0; first < row.size; first += kChunk) {
        if (!(row.chunks[first / kChunk].largest >= least)) continue;
        const int32_t last = std::min(first + kChunk, row.size);
        for (int32_t id = first; id < last; id += kWide) {
            const int32_t here = std::min(kWide, last - id);
            const F32x16 values = load_first(row.logits + id, here);
            const uint32_t found = at_least(values, bound) & ((1U << here) - 1U);
            if (found == 0) continue;
            compress(values, found, candidates.values + candidates.count);
            compress(lane_numbers() + I32x16::set1(id), found, candidates.ids + candidates.count);
            candidates.count += std::popcount(found);
        }
    }
}

float reached_by(const LogitsRow& row, int32_t count, float* work) {
    const int32_t num = num_chunks(row.size);
    if (count > num) return -std::numeric_limits<float>::infinity();
    for (int32_t i = 0; i < num; ++i) work[i] = row.chunks[i].largest;
    std::nth_element(work, work + count - 1, work + num, std::greater<>());
    return work[count - 1];
}

void keep_largest(Candidates& candidates, int32_t count) {
    if (candidates.count > count) keep(find_cut<ByCount>(candidates, count), candidates);
}

void keep_mass(Candidates& candidates, double share, const double* total) {
    const double goal = share * (total != nullptr ? *total : mass_of(candidates));
    keep(find_cut<ByMass>(candidates, goal), candidates);
}

}  // namespace kvarto::KVARTO_ISA
