"""Backend: what runs a Program. About twenty ops behind one signature, one instance per engine."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat
from kvarto.core.layout import Layout
from kvarto.core.ops import Op
from kvarto.core.program import Program
from kvarto.core.step import Step, StepResult
from kvarto.core.weight_format import WeightFormat


class Backend(Protocol):
    """Owns the device arena. Calls come from one thread, but for `copy_page` and `write_pages`, which copy threads
    make, `read_rows` and `host_pages`, which come from threads that pack adapters, and the two `store_…`, which come
    from several at once, never for the same weight.
    """

    @property
    def fingerprint(self) -> str:
        """Backend, activations, kernel version: two open backends with equal ones give equal bits."""
        ...

    def device_memory(self) -> tuple[int, int] | None:
        """Total and free bytes of the device's own memory; None where it computes in this machine's."""
        ...

    def default_kv_dtype(self, program: Program) -> DType:
        """What `--kv-cache-dtype auto` means here, for that program."""
        ...

    def weight_format(self, file_format: str) -> WeightFormat | None:
        """What it keeps in a matrix for a file's type (`BF16`, `Q4_K`, …); None: matrices are row-major here.

        Raises UnsupportedModel for a type that it cannot take.
        """
        ...

    def scratch_bytes(self, op: Op, program: Program, limits: StepLimits, kv_format: KVFormat) -> int:
        """Bytes that the op needs beside its buffers at the largest step; planned like a buffer of one op's life, but
        for those of `Logits`, which last until `Sample` has run.
        """
        ...

    def open(self, program: Program, layout: Layout) -> None:
        """Reserve the arena. Weights hold nothing yet."""
        ...

    def store_weight(self, name: str, offset_bytes: int, data: NDArray[np.uint8]) -> None:
        """Write raw bytes of a row-major weight, already in its dtype, at an offset inside it."""
        ...

    def store_rows(self, name: str, part_index: int, first_row: int, raw: NDArray[np.uint8]) -> None:
        """Pack rows `[rows, bytes of a row]` of a matrix's part, as files keep its format, from `first_row` on.

        `first_row` is a multiple of 16, and so is the number of rows, but for the part's last ones.
        """
        ...

    def read_rows(self, name: str, first_row: int, num_rows: int) -> NDArray[np.float32]:
        """Rows of a stored matrix as `[num_rows, columns]`, in float32: what its format means."""
        ...

    def run(self, step: Step) -> StepResult:
        """One pass: writes the step's KV into its slots and samples the rows asked for."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy a whole page inside the pages region."""
        ...

    def write_pages(self, pages: NDArray[np.int32], images: NDArray[np.uint8], which: NDArray[np.int32]) -> None:
        """Fill each of `pages` from its start with an image, the rest of it stays as it is: `images[which[i]]`, of
        `[num_images, at most page_bytes]`, goes to `pages[i]`.
        """
        ...

    def host_pages(self) -> NDArray[np.uint8] | None:
        """All pages, `[num_pages, page_bytes]`, where they lie in this machine's memory: who fills some of them that
        nobody reads needs no copy. None where they do not.
        """
        ...

    def bind_adapter(self, handle: int, adapter: BoundAdapter) -> None:
        """Let steps name an adapter by `handle`, a small integer that is not bound. Its pages are filled."""
        ...

    def unbind_adapter(self, handle: int) -> None:
        """Forget it. No step names the handle until it is bound again."""
        ...

    def close(self) -> None:
        """Give the arena back."""
        ...
