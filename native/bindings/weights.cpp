// kvarto.core._native.weights
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "weights/repack.h"

namespace nb = nanobind;

namespace kvarto {

namespace {

using RawRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Panels = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstPanels = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Formats come as their place in the enumeration, which kvarto.core.weight_format repeats.
RowShape row_shape(int32_t format, int32_t group_size, int32_t num_columns) {
    if (format < 0 || format > static_cast<int32_t>(Format::kInt4)) throw std::invalid_argument("unknown format");
    const RowShape shape{static_cast<Format>(format), group_size, num_columns};
    const bool has_group = shape.format == Format::kInt4;
    if (has_group ? group_size < 32 || group_size % 32 != 0 : group_size != 0)
        throw std::invalid_argument("group sizes are multiples of 32 for int4, and 0 for all else");
    const bool is_half = shape.format == Format::kF16 || shape.format == Format::kBF16;
    if (num_columns < 0 || (!is_half && num_columns % block_columns(shape.format, group_size) != 0))
        throw std::invalid_argument("columns are no multiple of the format's block");
    return shape;
}

int64_t bytes_of_panels(const RowShape& shape, int64_t num_rows) {
    return (num_rows + kLanes - 1) / kLanes * panel_bytes(shape.format, shape.group_size, shape.num_columns);
}

int64_t bound_part_bytes(int32_t format, int32_t group_size, int32_t num_rows, int32_t num_columns) {
    row_shape(format, group_size, num_columns);
    return part_bytes(static_cast<Format>(format), group_size, num_rows, num_columns);
}

int64_t bound_file_row_bytes(int32_t format, int32_t group_size, int32_t num_columns) {
    return file_row_bytes(row_shape(format, group_size, num_columns));
}

void bound_repack_rows(int32_t format, int32_t group_size, int32_t num_columns, RawRows rows, Panels panels) {
    const RowShape shape = row_shape(format, group_size, num_columns);
    const auto num_rows = static_cast<int64_t>(rows.shape(0));
    if (static_cast<int64_t>(rows.shape(1)) != file_row_bytes(shape))
        throw std::invalid_argument("rows have another size than the format's");
    if (static_cast<int64_t>(panels.size()) < bytes_of_panels(shape, num_rows))
        throw std::invalid_argument("the panels do not hold that many rows");
    const nb::gil_scoped_release released;
    repack_rows(shape, reinterpret_cast<const std::byte*>(rows.data()), num_rows,
                reinterpret_cast<std::byte*>(panels.data()));
}

void bound_unpack_rows(int32_t format, int32_t group_size, ConstPanels panels, int64_t first, FloatRows out) {
    const RowShape shape = row_shape(format, group_size, static_cast<int32_t>(out.shape(1)));
    const int64_t last = first + static_cast<int64_t>(out.shape(0));
    if (first < 0 || static_cast<int64_t>(panels.size()) < bytes_of_panels(shape, last))
        throw std::invalid_argument("the panels do not hold those rows");
    const nb::gil_scoped_release released;
    unpack_rows(shape, reinterpret_cast<const std::byte*>(panels.data()), first, last, out.data());
}

}  // namespace

void bind_weights(nb::module_& weights) {
    weights.def("part_bytes", &bound_part_bytes, "Bytes of a part in the weights region.", nb::arg("format"),
                nb::arg("group_size"), nb::arg("num_rows"), nb::arg("num_columns"));
    weights.def("file_row_bytes", &bound_file_row_bytes, "Bytes of one row as files keep it.", nb::arg("format"),
                nb::arg("group_size"), nb::arg("num_columns"));
    weights.def("repack_rows", &bound_repack_rows, "Write the panels of rows [num_rows, row bytes].",
                nb::arg("format"), nb::arg("group_size"), nb::arg("num_columns"), nb::arg("rows"), nb::arg("panels"));
    weights.def("unpack_rows", &bound_unpack_rows, "Fill `out` [num_rows, num_columns] with rows from `first` on.",
                nb::arg("format"), nb::arg("group_size"), nb::arg("panels"), nb::arg("first"), nb::arg("out"));
}

}  // namespace kvarto
