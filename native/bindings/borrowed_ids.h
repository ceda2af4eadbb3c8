// An int32 array, borrowed while a call reads or fills it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <stdexcept>

namespace kvarto {

class BorrowedIds {
public:
    BorrowedIds(nanobind::handle array, int flags) {
        if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) != 0)
            throw nanobind::python_error();
        const char* format = buffer_.format;
        if (buffer_.itemsize != sizeof(int32_t) || format == nullptr || format[0] != 'i' || format[1] != '\0') {
            PyBuffer_Release(&buffer_);
            throw std::invalid_argument("ids are int32");
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

}  // namespace kvarto
