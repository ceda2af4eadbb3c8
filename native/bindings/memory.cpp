// kvarto.core._native.memory
#include "memory/page_pool.h"
#include "bindings/borrowed_bytes.h"
#include "bindings/borrowed_ids.h"
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

// Everything is checked before the first byte is written.
void stream_pages(nb::handle out, int64_t page_bytes, nb::handle pages, nb::handle in, int64_t image_bytes,
                  nb::handle images) {
    const BorrowedBytes target(out, PyBUF_WRITABLE), source(in, 0);
    const BorrowedIds page_ids(pages, 0), image_ids(images, 0);
    if (image_bytes <= 0 || image_bytes > page_bytes)
        throw std::invalid_argument("an image is larger than a page, or empty");
    if (page_ids.span().size() != image_ids.span().size())
        throw std::invalid_argument("there is not one image for each page");
    const int64_t num_pages = target.span().size() / page_bytes, num_images = source.span().size() / image_bytes;
    for (size_t i = 0; i < page_ids.span().size(); ++i) {
        const int32_t page = page_ids.span()[i], image = image_ids.span()[i];
        if (page < 0 || page >= num_pages) throw std::invalid_argument("a page lies outside of its region");
        if (image < 0 || image >= num_images) throw std::invalid_argument("an image is not there");
    }
    const nb::gil_scoped_release released;
    for (size_t i = 0; i < page_ids.span().size(); ++i)
        stream_copy(target.span().data() + page_ids.span()[i] * page_bytes,
                    source.span().data() + image_ids.span()[i] * image_bytes, image_bytes);
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
    memory.def("stream_pages", &stream_pages, "out"_a, "page_bytes"_a, "pages"_a, "source"_a, "image_bytes"_a, "images"_a,
               "Copy images to the starts of pages, past the caches, the interpreter's lock released; for what nobody "
               "looks at soon. Raises ValueError where one is not there, before anything is written.");
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
