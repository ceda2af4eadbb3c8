// kvarto.core._native.memory
#include "memory/page_pool.h"
#include "bindings/borrowed_bytes.h"
#include "memory/stream_copy.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <stdexcept>
#include <tuple>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace kvarto {

namespace {

// An int32 array, borrowed while a call reads or fills it.
class BorrowedIds {
public:
    BorrowedIds(nb::handle array, int flags) {
        if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) != 0)
            throw nb::python_error();
        const char* format = buffer_.format;
        if (buffer_.itemsize != sizeof(int32_t) || format == nullptr || format[0] != 'i' || format[1] != '\0') {
            PyBuffer_Release(&buffer_);
            throw std::invalid_argument("page ids are int32");
        }
    }
    ~BorrowedIds() { PyBuffer_Release(&buffer_); }
    BorrowedIds(const BorrowedIds&) = delete;
    BorrowedIds& operator=(const BorrowedIds&) = delete;

    std::span<int32_t> span() const {
        return {static_cast<int32_t*>(buffer_.buf), static_cast<size_t>(buffer_.len) / sizeof(int32_t)};
    }

private:
    Py_buffer buffer_;
};

void copy_past_caches(nb::handle out, nb::handle in) {
    const BorrowedBytes target(out, PyBUF_WRITABLE), source(in, 0);
    if (target.span().size() != source.span().size())
        throw std::invalid_argument("bytes are copied into another number of them");
    const nb::gil_scoped_release released;
    stream_copy(target.span().data(), source.span().data(), source.span().size());
}

template <void (PagePool::*call)(PageIds)> void with_ids(PagePool& pool, nb::handle pages) {
    const BorrowedIds ids(pages, 0);
    (pool.*call)(ids.span());
}

bool take(PagePool& pool, nb::handle out, int32_t owner) {
    const BorrowedIds ids(out, PyBUF_WRITABLE);
    return pool.allocate(ids.span(), owner);
}

// Ids from anything that can be walked: they come a few at a time, mostly as a tuple.
void cache(PagePool& pool, nb::iterable pages) {
    for (const nb::handle page : pages) {
        const Py_ssize_t id = PyNumber_AsSsize_t(page.ptr(), PyExc_IndexError);
        if (id == -1 && PyErr_Occurred()) throw nb::python_error();
        if (id < 0 || id >= pool.num_pages()) throw std::out_of_range("a cached page is none of the pool's");
        pool.cache(std::array{static_cast<int32_t>(id)});
    }
}

std::tuple<int64_t, int64_t, int64_t> counts(const PagePool& pool, int32_t owner) {
    const PageCounts counts = pool.counts(owner);
    return {counts.held, counts.evictable, counts.draining};
}

// The array itself: it lives as long as any view of it.
template <class T, auto array> auto view(PagePool& pool) {
    const auto span = (pool.*array)();
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(span.data(), {span.size()}, nb::find(pool));
}

}  // namespace

void bind_memory(nb::module_& memory) {
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const BrokenLaw& error) {
            PyErr_SetString(PyExc_AssertionError, error.what());
        }
    });
    memory.def("stream_copy", &copy_past_caches, "out"_a, "source"_a,
               "Copy as many bytes past the caches, the interpreter's lock released; for what nobody looks at soon.");
    nb::class_<PagePool>(memory, "PagePool", "Counts, bits and free pages; see native/memory/page_pool.h.")
        .def(nb::init<int64_t>(), "num_pages"_a)
        .def_prop_ro("num_pages", &PagePool::num_pages)
        .def_prop_ro("num_free", &PagePool::num_free)
        .def_prop_ro("num_held", [](const PagePool& pool) { return pool.counts().held; })
        .def_prop_ro("num_evictable", [](const PagePool& pool) { return pool.counts().evictable; })
        .def_prop_ro("num_draining", [](const PagePool& pool) { return pool.counts().draining; })
        .def_prop_ro("num_owners", &PagePool::num_owners)
        .def("owner_counts", &counts, "owner"_a, "(held, evictable, draining) pages of one owner.")
        .def("take", &take, "out"_a, "owner"_a, "Fill `out` with free pages; False, nothing taken, when fewer are free.")
        .def("share", &with_ids<&PagePool::share>, "pages"_a)
        .def("free", &with_ids<&PagePool::free>, "pages"_a)
        .def("pin", &with_ids<&PagePool::pin>, "pages"_a)
        .def("unpin", &with_ids<&PagePool::unpin>, "pages"_a)
        .def("cache", &cache, "pages"_a)
        .def("uncache", &with_ids<&PagePool::uncache>, "pages"_a)
        .def("is_held", &PagePool::is_held, "page"_a)
        .def("is_pinned", &PagePool::is_pinned, "page"_a)
        .def("is_shared", &PagePool::is_shared, "page"_a)
        .def_prop_ro("_ref_count", &view<int32_t, &PagePool::ref_count>)
        .def_prop_ro("_pin_count", &view<int32_t, &PagePool::pin_count>)
        .def_prop_ro("_is_cached", &view<bool, &PagePool::is_cached>)
        .def_prop_ro("_owner", &view<int32_t, &PagePool::owner>)
        .def_prop_ro("_free", &view<int32_t, &PagePool::free_stack>);
#if defined(__SANITIZE_ADDRESS__)
    // For tests: between these two calls, native code that touches a byte of the range is reported.
    memory.def("poison", [](uintptr_t address, size_t size_bytes) {
        __asan_poison_memory_region(reinterpret_cast<void*>(address), size_bytes);
    });
    memory.def("unpoison", [](uintptr_t address, size_t size_bytes) {
        __asan_unpoison_memory_region(reinterpret_cast<void*>(address), size_bytes);
    });
#endif
}

}  // namespace kvarto
