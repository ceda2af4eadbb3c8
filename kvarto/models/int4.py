"""A safetensors folder whose weights are codes of 4 bits: hands them out under their plain names, by rows.

`X.qweight`, `X.qzeros`, `X.scales` and the like become one tensor `X.weight` of the type `INT4`; everything else passes
through. Content is never rounded: where float16 cannot hold a scale, or columns of a group are not neighbours, the
rows come as float32 only, and whoever wants them as codes is refused by name.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvarto.core.errors import UnsupportedModel
from kvarto.models.base import Float32, RawRows, WeightFiles
from kvarto.models.int4_config import Int4Layout, Int4Scheme, int4_scheme, without_quantisation
from kvarto.models.int4_layouts import Int4Rows, Words, awq_nibbles, column_zeros, row_nibbles, row_zeros
from kvarto.models.int4_modules import INT4, Int4Module, find_modules
from kvarto.models.safetensors import SafetensorsFiles


class Int4Files(WeightFiles):
    """Takes over `files`, and closes them."""

    def __init__(self, files: SafetensorsFiles, scheme: Int4Scheme) -> None:
        self.path = files.path
        self.config = without_quantisation(files.config)
        self._files = files
        self._scheme = scheme
        self._kept = threading.local()
        modules, self.tensors = find_modules(files, scheme)
        self._modules = {module.info.name: module for module in modules}
        self.may_be_unused = frozenset(name for name in map(_bias_name, modules) if self._is_zero(name))

    def read_rows(self, name: str, start: int, stop: int) -> Float32:
        """See WeightFiles."""
        module = self._modules.get(name)
        if module is None:
            return self._files.read_rows(name, start, stop)
        return self._read(module, start, stop).values(module.group_of_column)

    def has_raw_rows(self, name: str, *, is_transposed: bool) -> bool:
        """See WeightFiles."""
        if name not in self._modules:
            return self._files.has_raw_rows(name, is_transposed=is_transposed)
        return not is_transposed and self.tensors[name].file_dtype == INT4

    def read_raw_rows(self, name: str, start: int, stop: int) -> RawRows:
        """See WeightFiles. Raises UnsupportedModel where a scale is no float16 number."""
        module = self._modules.get(name)
        if module is None:
            return self._files.read_raw_rows(name, start, stop)
        rows = self._read(module, start, stop)
        with np.errstate(over="ignore"):
            halves = rows.scales.astype(np.float16)
        if not np.array_equal(halves.astype(np.float32), rows.scales):
            raise UnsupportedModel(
                f"`{module.scales}` has scales that float16 cannot hold; `--dtype bf16` widens the weights instead"
            )
        return rows.raw(halves)

    def close(self) -> None:
        """See WeightFiles."""
        self._kept = threading.local()
        self._files.close()

    # Reading.

    def _read(self, module: Int4Module, start: int, stop: int) -> Int4Rows:
        if self._scheme.layout is Int4Layout.PACK_QUANTIZED:
            words = self._words(module.codes, start, stop)
            scales = self._files.read_rows(module.scales, start, stop)
            return Int4Rows(row_nibbles(words), scales, self._row_zeros(module, start, stop, scales.shape))
        words, scales, zeros = self._whole(module)
        if self._scheme.layout is Int4Layout.AWQ:
            nibbles = awq_nibbles(words, start, stop)
        else:
            nibbles = row_nibbles(words[:, start:stop].T)
        return Int4Rows(nibbles, scales[start:stop], zeros[start:stop])

    def _row_zeros(self, module: Int4Module, start: int, stop: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if module.zeros is None:
            return np.full(shape, 8, np.uint8)
        if self._files.tensors[module.zeros].file_dtype == "I8":
            return self._files.read_raw_rows(module.zeros, start, stop) + np.uint8(8)
        first = start // 8
        zeros = row_zeros(self._words(module.zeros, first, -(-stop // 8)))
        return zeros[start - 8 * first : stop - 8 * first]

    def _whole(self, module: Int4Module) -> tuple[Words, Float32, NDArray[np.uint8]]:
        """A weight whose rows are columns on file is read once and kept until this thread reads the next one."""
        if getattr(self._kept, "name", None) != module.info.name:
            self._kept.name, self._kept.arrays = None, None  # before the next is read, so that only one is held
            self._kept.arrays = self._read_whole(module)
            self._kept.name = module.info.name
        arrays: tuple[Words, Float32, NDArray[np.uint8]] = self._kept.arrays
        return arrays

    def _read_whole(self, module: Int4Module) -> tuple[Words, Float32, NDArray[np.uint8]]:
        assert module.zeros is not None, "weights packed by columns have zero points"
        scales = np.ascontiguousarray(self._files.read_rows(module.scales, 0, self._rows_of(module.scales)).T)
        words = self._words(module.zeros, 0, self._rows_of(module.zeros))
        zeros = column_zeros(words, is_awq=self._scheme.layout is Int4Layout.AWQ)
        # Zero points kept less one wrap: 0 is 15 on file.
        zeros = (zeros + np.uint8(self._scheme.zero_offset)) & np.uint8(15)
        return self._words(module.codes, 0, self._rows_of(module.codes)), scales, zeros

    def _words(self, name: str, start: int, stop: int) -> Words:
        return self._files.read_raw_rows(name, start, stop).view("<u4")

    def _rows_of(self, name: str) -> int:
        return self._files.tensors[name].num_rows

    def _is_zero(self, bias: str) -> bool:
        """GPTQ's writers add biases of zeros to modules that have none; a model without biases may leave them."""
        return bias in self.tensors and not self._files.read_rows(bias, 0, 1).any()


def _bias_name(module: Int4Module) -> str:
    return module.info.name.removesuffix("weight") + "bias"


def open_quantised(files: SafetensorsFiles) -> WeightFiles:
    """`files` themselves where nothing is quantised. Closes them when it raises."""
    try:
        scheme = int4_scheme(files.config)
        return files if scheme is None else Int4Files(files, scheme)
    except BaseException:
        files.close()
        raise
