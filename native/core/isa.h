// Which instruction sets this build has and this machine can run.
#pragma once

#include <string_view>
#include <vector>

#include "core/kernels.h"

namespace kvarto {

// Kernels of every set that can run here, the plainest first and the best last. The first call asks the system for
// the tiles of AMX, once per process; where it refuses, `amx` is not among them.
const std::vector<const Kernels*>& available_kernels();

// The set of that name. Throws std::invalid_argument that names those there are.
const Kernels& kernels_of(std::string_view name);

}  // namespace kvarto
