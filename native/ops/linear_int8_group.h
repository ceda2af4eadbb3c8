// A group of sixteen weight rows as tiles of rows meet it: unpacked once for all of them.
#pragma once

#include "ops/linear_int8.h"
#include "weights/unpack.h"

namespace kvarto::KVARTO_ISA {

template <int num_halves> struct WeightGroup {
    alignas(64) int8_t quads[8][64];  // signed, or with the offset still in them: see kHasSignedWeights
    float scales[num_halves][16];
    float minimum[16];
};

}  // namespace kvarto::KVARTO_ISA
