"""Which tensors of a quantised safetensors folder make which weight, checked against each other before any is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.core.weight_format import WeightFormat
from kvarto.models.base import TensorInfo
from kvarto.models.int4_config import Int4Layout, Int4Scheme
from kvarto.models.safetensors import SafetensorsFiles

INT4 = WeightFormat.INT4.name
UNORDERED = "INT4 with g_idx"
"""The type of weights whose groups are not runs of neighbouring columns."""

_COLUMN_NAMES = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros", "groups": ".g_idx"}
_ROW_NAMES = {
    "codes": ".weight_packed", "scales": ".weight_scale", "zeros": ".weight_zero_point", "groups": ".weight_g_idx",
    "shape": ".weight_shape",
}  # fmt: skip
_WORDS = ("I32", "U32")
_SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Int4Module:
    """One quantised weight, and the names of what it is made of."""

    info: TensorInfo
    codes: str
    scales: str
    zeros: str | None
    """None: all zero points are 8."""
    group_of_column: NDArray[np.int64]


def find_modules(files: SafetensorsFiles, scheme: Int4Scheme) -> tuple[list[Int4Module], dict[str, TensorInfo]]:
    """The quantised modules, and all tensors with each module's replaced by its weight. Raises BadFile."""
    tensors, modules = dict(files.tensors), []
    suffix = _names(scheme)["codes"]
    for name in files.tensors:
        if name.endswith(suffix):
            module = _Parts(files, scheme, name.removesuffix(suffix), tensors).join()
            modules.append(module)
            tensors[module.info.name] = module.info
    if not modules:
        raise BadFile(f"`{files.path}` says that its weights are {scheme.layout}, and no tensor is named `…{suffix}`")
    return modules, tensors


def _names(scheme: Int4Scheme) -> dict[str, str]:
    return _ROW_NAMES if scheme.layout is Int4Layout.PACK_QUANTIZED else _COLUMN_NAMES


class _Parts:
    """The tensors of one module, taken out of `tensors`."""

    def __init__(
        self, files: SafetensorsFiles, scheme: Int4Scheme, module: str, tensors: dict[str, TensorInfo]
    ) -> None:
        if f"{module}.weight" in tensors:
            raise BadFile(f"`{files.path}` has `{module}.weight` both quantised and not")
        self._files = files
        self._scheme = scheme
        self._module = module
        self._infos = {part: tensors.pop(module + suffix, None) for part, suffix in _names(scheme).items()}

    def join(self) -> Int4Module:
        """Check shapes and types against each other."""
        codes, (num_rows, num_columns) = self._codes()
        scales, num_groups = self._scales(num_rows)
        group_size = self._group_size(num_columns, num_groups)
        zeros = self._zeros(num_rows, num_groups)
        groups = self._groups(num_columns, num_groups)
        is_ordered = np.array_equal(groups, np.arange(num_columns) // group_size)
        file_dtype = INT4 if is_ordered else UNORDERED
        file_bytes = sum(info.file_bytes for info in self._infos.values() if info is not None)
        info = TensorInfo(f"{self._module}.weight", (num_rows, num_columns), file_dtype, file_bytes, group_size)
        return Int4Module(info, codes, scales, zeros, groups)

    @property
    def _is_by_row(self) -> bool:
        return self._scheme.layout is Int4Layout.PACK_QUANTIZED

    def _codes(self) -> tuple[str, tuple[int, int]]:
        info = self._infos["codes"]
        if info is None or info.file_dtype not in _WORDS or len(info.shape) != 2 or 0 in info.shape:
            self._refuse("codes", "words of 32 bits in two dimensions")
        first, second = info.shape
        if self._is_by_row:
            return info.name, (first, 8 * second)
        shape = (8 * second, first) if self._scheme.layout is Int4Layout.AWQ else (second, 8 * first)
        return info.name, shape

    def _scales(self, num_rows: int) -> tuple[str, int]:
        info = self._infos["scales"]
        if info is None or info.file_dtype not in _SCALES or len(info.shape) != 2 or 0 in info.shape:
            self._refuse("scales", f"scales of {num_rows} rows")
        rows, num_groups = info.shape if self._is_by_row else info.shape[::-1]
        if rows != num_rows:
            self._refuse("scales", f"scales of {num_rows} rows")
        return info.name, num_groups

    def _group_size(self, num_columns: int, num_groups: int) -> int:
        group_size, announced = num_columns // num_groups, self._scheme.group_size
        is_as_announced = announced is None or group_size == min(announced, num_columns)
        if num_columns % num_groups or not is_as_announced:
            raise BadFile(
                f"`{self._files.path}`: `{self._module}` has {num_columns} columns and scales for {num_groups} groups "
                f"of them; groups of {announced or num_columns} were announced"
            )
        if group_size % 32:
            raise UnsupportedModel(
                f"`{self._files.path}`: `{self._module}` has groups of {group_size} columns; multiples of 32 are built "
                "in: quantise the model with groups of 32, 64 or 128"
            )
        return group_size

    def _zeros(self, num_rows: int, num_groups: int) -> str | None:
        info = self._infos["zeros"]
        if info is None and self._is_by_row:
            return None
        shape = (-(-num_rows // 8), num_groups) if self._is_by_row else (num_groups, num_rows // 8)
        types: tuple[str, ...] = _WORDS
        if self._is_by_row and info is not None and info.file_dtype == "I8":  # as early versions wrote them
            shape, types = (num_rows, num_groups), ("I8",)
        if info is None or info.shape != shape or info.file_dtype not in types:
            self._refuse("zeros", f"zero points of shape {list(shape)}")
        return info.name

    def _groups(self, num_columns: int, num_groups: int) -> NDArray[np.int64]:
        """The group of each column."""
        info, in_order = self._infos["groups"], np.arange(num_columns) // (num_columns // num_groups)
        if info is None:
            return in_order
        if info.shape != (num_columns,) or info.file_dtype != "I32":
            self._refuse("groups", f"I32 of shape [{num_columns}]")
        groups = self._files.read_raw_rows(info.name, 0, 1).reshape(-1).view("<i4").astype(np.int64)
        if (groups == -1).all():  # never set
            return in_order
        if (groups < 0).any() or (groups >= num_groups).any():
            raise BadFile(f"`{self._files.path}`: `{info.name}` names other groups than the {num_groups} there are")
        return groups

    def _refuse(self, part: str, expected: str) -> NoReturn:
        info, name = self._infos[part], self._module + _names(self._scheme)[part]
        found = "missing" if info is None else f"{info.file_dtype} of shape {list(info.shape)}"
        raise BadFile(f"`{self._files.path}`: `{name}` is {found}; {self._scheme.layout} needs {expected}")
