// The exact search for offsets.
#include "planning/offset_search.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

namespace {

using Found = std::tuple<std::optional<std::vector<int64_t>>, bool, int64_t>;

Found search(const std::vector<std::tuple<int64_t, int32_t, int32_t>>& buffers, int64_t capacity, double time_limit_s) {
    std::vector<SearchBuffer> made;
    for (const auto& [size, first, last] : buffers) {
        if (size < 0 || first >= last) throw std::invalid_argument("a buffer has a negative size, or is never live");
        made.push_back({first, last, size});
    }
    if (capacity < 0) throw std::invalid_argument("the capacity is negative");
    const nb::gil_scoped_release released;
    SearchResult result = search_offsets(made, capacity, time_limit_s);
    return {std::move(result.offsets), result.is_complete, result.num_nodes};
}

}  // namespace

void bind_planning(nb::module_& planning) {
    planning.def("search_offsets", &search, "buffers"_a, "capacity"_a, "time_limit_s"_a,
                 "Offsets for buffers (size, first, last) below `capacity`, or None; whether that is proven; nodes.");
}

}  // namespace kvarto
