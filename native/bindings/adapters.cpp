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
                                                                  nb::handle stream, nb::handle beside,
                                                                  bool may_be_direct) {
    const PackKernels& kernels = kernels_of(isa).pack;
    const BorrowedBytes stream_bytes(stream, PyBUF_WRITABLE), beside_bytes(beside, PyBUF_WRITABLE);
    PackPlan::Result result;
    {
        const nb::gil_scoped_release released;
        result = plan.pack(kernels, file, stream_bytes.span(), beside_bytes.span(), may_be_direct);
    }
    if (result.end == PackPlan::End::kDone) return {std::nullopt, result.num_direct_bytes};
    const bool is_finite = result.end == PackPlan::End::kTooLarge;
    if (is_finite || result.end == PackPlan::End::kNotFinite)
        return {std::pair(result.tensor, is_finite), result.num_direct_bytes};
    raise(result);
}

void hash_pages(const std::string& isa, nb::handle point, nb::handle pages, int64_t page_bytes, nb::handle hashes) {
    const HashPages hash = kernels_of(isa).hash_pages;
    if (hash == nullptr) throw std::invalid_argument("instruction set `" + isa + "` multiplies nothing without carries");
    const BorrowedBytes of_point(point, 0), of_pages(pages, 0), of_hashes(hashes, PyBUF_WRITABLE);
    if (page_bytes <= 0 || page_bytes % kHashedBytes != 0)
        throw std::invalid_argument("pages of " + std::to_string(page_bytes) + " bytes are not hashed; multiples of " +
                                    std::to_string(kHashedBytes) + " are");
    const int64_t size = of_pages.span().size(), num_pages = size / page_bytes;
    if (size % page_bytes != 0) throw std::invalid_argument("the bytes are not whole pages");
    if (of_point.span().size() != kPageHashBytes) throw std::invalid_argument("a point has 16 bytes");
    if (of_hashes.span().size() % kPageHashBytes != 0 ||
        static_cast<int64_t>(of_hashes.span().size()) / kPageHashBytes != num_pages)
        throw std::invalid_argument("there is not one place of 16 bytes for each page's hash");
    const nb::gil_scoped_release released;
    hash(of_point.span().data(), of_pages.span().data(), num_pages, page_bytes, of_hashes.span().data());
}

}  // namespace

void bind_adapters(nb::module_& adapters) {
    adapters.def("can_hash_pages", [](const std::string& isa) { return kernels_of(isa).hash_pages != nullptr; }, "isa"_a,
                 "Whether that instruction set can. Raises ValueError where it cannot run here.");
    adapters.def("hash_pages", &hash_pages, "isa"_a, "point"_a, "pages"_a, "page_bytes"_a, "hashes"_a,
                 "POLYVAL of each page at a point of 16 bytes, the interpreter's lock released; see native/ops/page_hash.h. "
                 "Equal on all sets that can. Raises ValueError for pages that are not multiples of 64 bytes.");
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
        .def("pack", &pack, "isa"_a, "file"_a, "stream"_a, "beside"_a, "may_be_direct"_a,
             "Fill both from an open descriptor, the interpreter's lock released; the same bytes on all sets. Returns the "
             "index of the first tensor in the file with a value that is not finite, or finite and too large for a code, "
             "and whether it is; or None; and how many bytes came past the page cache. Raises OSError, and EOFError where "
             "the file has become shorter.");
}

}  // namespace kvarto
