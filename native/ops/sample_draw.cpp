// A row with filters is read once, and only where a chunk can matter: the filters first become a bound on raw logits,
// what lies above it is collected, and the filters' exact laws are applied to that.
//
// A row without filters is hardly read: noise is hashed for all ids (about 30 operations for 16 of them with AVX-512, 12
// cycles), and the logit is looked at, and the two logarithms taken, only where the hash says that the id could win.
#include "ops/sample_draw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "ops/lanes.h"
#include "ops/sample_noise.h"
#include "simd/mask16.h"

namespace kvarto::KVARTO_ISA {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Winner {
    float value = kLowest;
    int32_t id = std::numeric_limits<int32_t>::max();

    void offer(float other, int32_t other_id) {
        if (other > value || (other == value && other_id < id)) {
            value = other;
            id = other_id;
        }
    }
};

// (logit - largest) / temperature: at most 0, so that a small temperature cannot overflow upwards.
struct Scaling {
    float largest;
    float temperature;

    float scaled(float logit) const { return (logit - largest) / temperature; }
    F32x16 scaled(F32x16 logits) const {
        return (logits - F32x16::set1(largest)) / F32x16::set1(temperature);
    }
    // A logit below all whose scaled value is at least `value`: both steps round, and tiny quotients to multiples of
    // 2^-149.
    float logit_below(double value) const {
        const double room = std::fabs(value) * 0x1p-20 + 0x1p-148;
        const double logit = largest + (value - room) * temperature;
        return std::nextafterf(static_cast<float>(logit - std::fabs(logit) * 0x1p-22), kLowest);
    }
};

// What the hash's upper 31 bits must not exceed for noise to lift `values` to the winner or above it: noise reaches t
// only where u ≤ exp(-t). The thousandth is more than exp and the roundings lose.
F32x16 hash_limit(F32x16 values, const Winner& winner) {
    return exp(values - F32x16::set1(winner.value)) * F32x16::set1(1.001F * 0x1p31F);
}

void offer_lanes(uint32_t lanes, const float* values, const int32_t* ids, uint64_t key, Winner& winner) {
    for (; lanes != 0; lanes &= lanes - 1) {
        const int lane = std::countr_zero(lanes);
        winner.offer(values[lane] + gumbel(noise_hash(key, ids[lane])), ids[lane]);
    }
}

int32_t draw_among(const Candidates& candidates, uint64_t key) {
    Winner winner;
    for (int32_t i = 0; i < candidates.count; i += kWide) {
        const int32_t here = std::min(kWide, candidates.count - i);
        uint32_t lanes = (1U << here) - 1U;
        if (winner.value > kLowest) {
            const F32x16 limit = hash_limit(load_first(candidates.values + i, here), winner);
            lanes &= at_least(limit, noise_tops(candidates.ids + i, key));
        }
        offer_lanes(lanes, candidates.values + i, candidates.ids + i, key, winner);
    }
    return winner.id;
}

// Sixteen ids from `id` on, some of which may win.
void offer_some(const LogitsRow& row, const Scaling& scaling, int32_t id, F32x16 tops, uint64_t key, Winner& winner) {
    const int32_t here = std::min(kWide, row.size - id);
    const F32x16 scaled = scaling.scaled(load_first(row.logits + id, here));
    const uint32_t lanes = at_least(hash_limit(scaled, winner), tops) & ((1U << here) - 1U);
    float values[kWide];
    int32_t ids[kWide];
    scaled.store(values);
    (lane_numbers() + I32x16::set1(id)).store(ids);
    offer_lanes(lanes, values, ids, key, winner);
}

// A chunk's largest logit says for all its ids what their hashes must not exceed, so most logits are not read.
int32_t draw_among_all(const LogitsRow& row, const Scaling& scaling, uint64_t key) {
    Winner winner;
    const int32_t likeliest = arg_max(row);
    winner.offer(gumbel(noise_hash(key, likeliest)), likeliest);
    for (int32_t first = 0; first < row.size; first += kChunk) {
        const F32x16 largest = F32x16::set1(scaling.scaled(row.chunks[first / kChunk].largest));
        const F32x16 limit = hash_limit(largest, winner);
        for (int32_t id = first; id < std::min(first + kChunk, row.size); id += kWide) {
            const F32x16 tops = noise_tops_from(id, key);
            if (at_least(limit, tops) != 0) offer_some(row, scaling, id, tops, key, winner);
        }
    }
    return winner.id;
}

F32x16 first_of(F32x16 a, int32_t count) {
    float lanes[kWide];
    a.store(lanes);
    return load_first(lanes, count);
}

// Sum of exp(scaled), chunk by chunk.
double total_mass(const LogitsRow& row, const Scaling& scaling) {
    double total = 0.0;
    for (int32_t first = 0; first < row.size; first += kChunk) {
        F32x16 mass = F32x16::zero();
        each_vector(std::min(kChunk, row.size - first), [&](int32_t i, int32_t here) {
            const F32x16 terms = exp(scaling.scaled(load_first(row.logits + first + i, here)));
            mass = mass + (here == kWide ? terms : first_of(terms, here));
        });
        total += static_cast<double>(sum(mass));
    }
    return total;
}

// All that the filters may keep lies above it.
float filter_bound(const LogitsRow& row, const DrawRules& rules, const Scaling& scaling, double total, float* work) {
    const double min_value = rules.min_p > 0.0F ? std::log(static_cast<double>(rules.min_p)) : kLowest;
    if (rules.top_k > 0 && rules.top_k < row.size) {
        const float reached = reached_by(row, rules.top_k, work);
        return reached > kLowest ? scaling.logit_below(scaling.scaled(reached)) : kLowest;
    }
    if (rules.top_p < 1.0F) {
        // What lies below it has together at most half of the mass that top-p leaves out.
        const double rest = (1.0 - static_cast<double>(rules.top_p)) * total;
        return scaling.logit_below(std::log(0.5 * rest / row.size));
    }
    return min_value > kLowest ? scaling.logit_below(min_value) : kLowest;
}

void drop_unlikely(Candidates& candidates, float min_p) {
    const auto least = static_cast<float>(std::log(static_cast<double>(min_p)));
    int32_t kept = 0;
    for (int32_t i = 0; i < candidates.count; ++i) {
        if (candidates.values[i] < least) continue;
        candidates.ids[kept] = candidates.ids[i];
        candidates.values[kept++] = candidates.values[i];
    }
    candidates.count = kept;
}

void scale(Candidates& candidates, const Scaling& scaling) {
    each_vector(candidates.count, [&](int32_t i, int32_t here) {
        store_first(scaling.scaled(load_first(candidates.values + i, here)), candidates.values + i, here);
    });
}

}  // namespace

DrawRules::DrawRules(const SamplingView& sampling, int32_t s)
    : temperature(sampling.temperature[s]),
      top_k(sampling.top_k[s]),
      top_p(sampling.top_p[s]),
      min_p(sampling.min_p[s]),
      key(noise_key(sampling.seed[s], sampling.choice[s], sampling.position[s])) {}

int32_t arg_max(const LogitsRow& row) {
    int32_t best = 0;
    for (int32_t i = 1; i < num_chunks(row.size); ++i)
        if (row.chunks[i].largest > row.chunks[best].largest) best = i;
    return row.chunks[best].arg_largest;
}

int32_t draw(const LogitsRow& row, const DrawRules& rules, Candidates& candidates, float* work) {
    const Scaling scaling{row.logits[arg_max(row)], rules.temperature};
    const bool has_top_k = rules.top_k > 0 && rules.top_k < row.size, has_top_p = rules.top_p < 1.0F;
    if (!has_top_k && !has_top_p && !(rules.min_p > 0.0F)) return draw_among_all(row, scaling, rules.key);
    const double total = has_top_p && !has_top_k ? total_mass(row, scaling) : 0.0;
    collect(row, filter_bound(row, rules, scaling, total, work), candidates);
    scale(candidates, scaling);
    if (has_top_k) keep_largest(candidates, rules.top_k);
    if (has_top_p) keep_mass(candidates, static_cast<double>(rules.top_p), has_top_k ? nullptr : &total);
    if (rules.min_p > 0.0F) drop_unlikely(candidates, rules.min_p);
    return draw_among(candidates, rules.key);
}

}  // namespace kvarto::KVARTO_ISA
