// Bytes of an array, borrowed while a call reads or fills them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>

namespace kvarto {

class BorrowedBytes {
public:
    // `flags`: PyBUF_WRITABLE to fill them, or 0. Throws where they do not follow each other, or may not be written.
    BorrowedBytes(nanobind::handle array, int flags) {
        if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | flags) != 0) throw nanobind::python_error();
    }
    ~BorrowedBytes() { PyBuffer_Release(&buffer_); }
    BorrowedBytes(const BorrowedBytes&) = delete;
    BorrowedBytes& operator=(const BorrowedBytes&) = delete;

    std::span<std::byte> span() const {
        return {static_cast<std::byte*>(buffer_.buf), static_cast<size_t>(buffer_.len)};
    }

private:
    Py_buffer buffer_;
};

}  // namespace kvarto
