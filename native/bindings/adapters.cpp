// Adapters on their way from files to pages.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "adapters/pack_plan.h"
#include "bindings/borrowed_bytes.h"
#include "bindings/borrowed_ids.h"
#include "core/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

namespace {

FileTensor file_tensor(int64_t offset, int64_t num_rows, int64_t num_columns, int64_t start, int32_t type,
                       int32_t strips, bool is_transposed, bool is_beside, int64_t num_heads) {
    if (type < 0 || type > static_cast<int32_t>(FileType::kQ8_0))
        throw std::invalid_argument("packing: no such type of tensors");
    if (strips < 0 || strips > static_cast<int32_t>(StripType::kQ4))
        throw std::invalid_argument("packing: no such type of strips");
    return {offset, num_rows, num_columns, start, static_cast<FileType>(type), static_cast<StripType>(strips),
            is_transposed, is_beside, num_heads};
}

[[noreturn]] void raise(const PackPlan::Result& result) {
    if (result.end == PackPlan::End::kFailed) {
        errno = result.error;
        PyErr_SetFromErrno(PyExc_OSError);
    } else {
        PyErr_SetString(PyExc_EOFError, "the file ended before the last tensor");
    }
    throw nb::python_error();
}

std::tuple<std::optional<std::pair<int64_t, bool>>, int64_t> pack(const PackPlan& plan, const std::string& isa, int file,
                                                                  nb::handle region, int64_t page_bytes,
                                                                  nb::handle pages, nb::handle beside,
                                                                  bool may_be_direct) {
    const PackKernels& kernels = kernels_of(isa).pack;
    const BorrowedBytes region_bytes(region, PyBUF_WRITABLE), beside_bytes(beside, PyBUF_WRITABLE);
    const BorrowedIds page_ids(pages, 0);
    const PagedStream stream(region_bytes.span(), page_bytes, page_ids.span());
    PackPlan::Result result;
    {
        const nb::gil_scoped_release released;
        result = plan.pack(kernels, file, stream, beside_bytes.span(), may_be_direct);
    }
    if (result.end == PackPlan::End::kDone) return {std::nullopt, result.num_direct_bytes};
    const bool is_finite = result.end == PackPlan::End::kTooLarge;
    if (is_finite || result.end == PackPlan::End::kNotFinite)
        return {std::pair(result.tensor, is_finite), result.num_direct_bytes};
    raise(result);
}

void hash_pages(const std::string& isa, nb::handle point, nb::handle region, int64_t page_bytes, nb::handle pages,
                nb::handle hashes) {
    const HashPages hash = kernels_of(isa).hash_pages;
    if (hash == nullptr) throw std::invalid_argument("instruction set `" + isa + "` multiplies nothing without carries");
    const BorrowedBytes of_point(point, 0), of_region(region, 0), of_hashes(hashes, PyBUF_WRITABLE);
    const BorrowedIds page_ids(pages, 0);
    if (page_bytes <= 0 || page_bytes % kHashedBytes != 0)
        throw std::invalid_argument("pages of " + std::to_string(page_bytes) + " bytes are not hashed; multiples of " +
                                    std::to_string(kHashedBytes) + " are");
    const int64_t num_pages = static_cast<int64_t>(of_region.span().size()) / page_bytes;
    for (const int32_t page : page_ids.span())
        if (page < 0 || page >= num_pages) throw std::invalid_argument("a page lies outside of its region");
    if (of_point.span().size() != kPageHashBytes) throw std::invalid_argument("a point has 16 bytes");
    if (of_hashes.span().size() != page_ids.span().size() * kPageHashBytes)
        throw std::invalid_argument("there is not one place of 16 bytes for each page's hash");
    const nb::gil_scoped_release released;
    hash(of_point.span().data(), of_region.span().data(), page_ids.span(), page_bytes, of_hashes.span().data());
}

}  // namespace

void bind_adapters(nb::module_& adapters) {
    adapters.def("can_hash_pages", [](const std::string& isa) { return kernels_of(isa).hash_pages != nullptr; }, "isa"_a,
                 "Whether that instruction set can. Raises ValueError where it cannot run here.");
    adapters.def("hash_pages", &hash_pages, "isa"_a, "point"_a, "region"_a, "page_bytes"_a, "pages"_a, "hashes"_a,
                 "POLYVAL of each of some pages of a region at a point of 16 bytes, the interpreter's lock released; see "
                 "native/ops/page_hash.h. Equal on all sets that can. Raises ValueError for pages that are not there, or not "
                 "multiples of 64 bytes.");
    nb::class_<FileTensor>(adapters, "FileTensor", "Where a tensor lies in a file, and where it goes.")
        .def("__init__", [](FileTensor* self, int64_t offset, int64_t num_rows, int64_t num_columns, int64_t start,
                            int32_t type, int32_t strips, bool is_transposed, bool is_beside, int64_t num_heads) {
            new (self) FileTensor(
                file_tensor(offset, num_rows, num_columns, start, type, strips, is_transposed, is_beside, num_heads));
        }, "offset"_a, "num_rows"_a, "num_columns"_a, "start"_a, "type"_a, "strips"_a, "is_transposed"_a, "is_beside"_a,
             "num_heads"_a);
    nb::class_<PackPlan>(adapters, "PackPlan", "One pass over an adapter's file; see native/adapters/pack_plan.h.")
        .def(nb::init<std::vector<FileTensor>, int64_t, int64_t, int64_t>(), "tensors"_a, "file_bytes"_a,
             "stream_bytes"_a, "beside_bytes"_a)
        .def("pack", &pack, "isa"_a, "file"_a, "region"_a, "page_bytes"_a, "pages"_a, "beside"_a, "may_be_direct"_a,
             "Fill these pages of the region, in this order, and what goes beside from an open descriptor, the interpreter's lock released; the same bytes on all sets. Returns the "
             "index of the first tensor in the file with a value that is not finite, or finite and too large for a code, "
             "and whether it is; or None; and how many bytes came past the page cache. Raises OSError, and EOFError where "
             "the file has become shorter.");
}

}  // namespace kvarto
