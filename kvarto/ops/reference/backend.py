"""ReferenceBackend: runs a Program op by op in PyTorch, inside the planned arena."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.errors import UsageError
from kvarto.core.kv_format import KVFormat
from kvarto.core.layout import Layout
from kvarto.core.ops import Op, Sample
from kvarto.core.program import Program
from kvarto.core.step import Step, StepResult
from kvarto.core.weight_format import WeightFormat
from kvarto.memory.arena import Arena
from kvarto.ops.adapter_check import AdapterCheck
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.device_memory import DeviceMemory
from kvarto.ops.reference.kernel import TORCH_DTYPES, Kernel, Sizes, Views
from kvarto.ops.reference.kernels import KERNELS
from kvarto.ops.reference.scratch import carve, total_bytes

KERNEL_VERSION = 1
"""Raised by every change that can change a bit of the output."""


class ReferenceBackend:
    """Implements `ops.base.Backend` on any torch device. One per process: PyTorch's thread count is the process's."""

    def __init__(self, device: str = "cpu", threads: int | None = None) -> None:
        self._device = _open_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        self._memory: DeviceMemory | None = None
        self._program: Program | None = None
        self._layout: Layout | None = None
        self._adapters: dict[int, BoundAdapter] = {}
        self._check: AdapterCheck | None = None
        self._kernels: tuple[Kernel[Any], ...] = ()
        self._logits: torch.Tensor | None = None
        self._num_logits = 0

    @property
    def fingerprint(self) -> str:
        """Thread count included: a matrix library may divide its sums by it."""
        device = self._device.type
        if device == "cpu":
            device = f"cpu-{torch.backends.cpu.get_cpu_capability()}-{torch.get_num_threads()}"
        elif device == "cuda":
            device = f"cuda-{torch.cuda.get_device_name(self._device)}"
        return f"reference-{KERNEL_VERSION}/f32/torch-{torch.__version__}/{device}"

    @property
    def arena(self) -> Arena | None:
        """The arena of an open backend on a CPU, to back it ahead and to count it."""
        return None if self._memory is None else self._memory.arena

    def device_memory(self) -> tuple[int, int] | None:
        """See `ops.base.Backend`. Devices that cannot be asked count as this machine's memory."""
        if self._device.type != "cuda":
            return None
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes, free_bytes

    def default_kv_dtype(self, program: Program) -> DType:
        """f32: nothing is lost by paging."""
        return DType.F32

    def weight_format(self, file_format: str) -> WeightFormat | None:
        """None: matrices are dense here, whatever the file has."""
        return None

    def scratch_bytes(self, op: Op, program: Program, limits: StepLimits, kv_format: KVFormat) -> int:
        """See `ops.base.Backend`. Raises UsageError for KV in int8."""
        if kv_format.dtype not in TORCH_DTYPES:
            raise UsageError(
                f"`--kv-cache-dtype {kv_format.dtype}` needs the native backend; the reference keeps f32, f16 or bf16"
            )
        return total_bytes(KERNELS[type(op)].scratch(op, Sizes(program, limits, kv_format)))

    def open(self, program: Program, layout: Layout) -> None:
        """See `ops.base.Backend`. Raises MemoryLimitError when the machine refuses the arena."""
        assert self._memory is None, "the backend is open"
        self._memory = memory = DeviceMemory(layout.total_bytes, self._device)
        self._program, self._layout = program, layout
        sizes = Sizes(program, layout.limits, layout.kv_format)
        views = _views(memory, layout, sizes)
        kernels = []
        for index, op in enumerate(program.ops):
            kernel = KERNELS[type(op)]
            pieces = kernel.scratch(op, sizes)
            scratch = carve(memory.bytes, layout.scratch_offsets[index], pieces) if pieces else {}
            kernels.append(kernel(op, views, scratch))
            if isinstance(op, Sample):
                self._logits = views.buffers[op.logits]
        self._kernels = tuple(kernels)

    def store_weight(self, name: str, offset_bytes: int, data: NDArray[np.uint8]) -> None:
        """See `ops.base.Backend`."""
        memory, layout = self._opened()
        memory.write(layout.weight_offsets[name] + offset_bytes, data)

    def store_rows(self, name: str, part_index: int, first_row: int, raw: NDArray[np.uint8]) -> None:
        """Never called: `weight_format` keeps no parts."""
        raise AssertionError(f"`{name}` is row-major on the reference backend")

    def read_rows(self, name: str, first_row: int, num_rows: int) -> NDArray[np.float32]:
        """See `ops.base.Backend`."""
        memory, layout = self._opened()
        assert self._program is not None, "an open backend has a program"
        weight = self._program.weights[name]
        assert 0 <= first_row <= first_row + num_rows <= weight.shape[0], f"rows {first_row} + {num_rows} of `{name}`"
        matrix = memory.view(layout.weight_offsets[name], weight.shape, TORCH_DTYPES[weight.dtype])
        rows: NDArray[np.float32] = matrix[first_row : first_row + num_rows].float().cpu().numpy().copy()
        return rows

    def run(self, step: Step) -> StepResult:
        """See `ops.base.Backend`."""
        _, layout = self._opened()
        _check_size(step, layout.limits)
        batch = Batch(step, layout.kv_format.page_size, self._device, self._adapters)
        with torch.inference_mode():
            for kernel in self._kernels:
                kernel.run(batch)
        self._num_logits = step.num_samples
        assert batch.result is not None, "a program ends with `Sample`"
        return batch.result

    def logits_of_last_step(self) -> NDArray[np.float32]:
        """`[num_samples, vocab_size]`, raw. For tests."""
        assert self._logits is not None, "no step has run"
        logits: NDArray[np.float32] = self._logits[: self._num_logits].cpu().numpy().copy()
        return logits

    def copy_page(self, source: int, target: int) -> None:
        """See `ops.base.Backend`."""
        memory, layout = self._opened()
        memory.copy_item(layout.pages, layout.kv_format.page_bytes, source, target)

    def host_pages(self) -> NDArray[np.uint8] | None:
        """None, see `ops.base.Backend`: PyTorch owns them, and may have them on a device."""
        return None

    def write_pages(self, pages: NDArray[np.int32], images: NDArray[np.uint8], which: NDArray[np.int32]) -> None:
        """See `ops.base.Backend`."""
        memory, layout = self._opened()
        size_bytes = layout.kv_format.page_bytes
        assert images.shape[1] <= size_bytes, f"{images.shape[1]} bytes for a page of {size_bytes}"
        for page, image in zip(pages.tolist(), which.tolist(), strict=True):
            assert 0 <= page < layout.num_pages, f"page {page} of {layout.num_pages}"
            assert 0 <= image < len(images), f"image {image} of {len(images)}"
            memory.write(layout.pages.offset + page * size_bytes, images[image])

    def bind_adapter(self, handle: int, adapter: BoundAdapter) -> None:
        """See `ops.base.Backend`. Raises ValueError where it does not fit the program, the plan or the pool."""
        _, layout = self._opened()
        assert self._program is not None, "an open backend has a program"
        assert handle not in self._adapters, f"handle {handle} is bound"
        if self._check is None:
            self._check = AdapterCheck(self._program, layout)
        self._check.check(handle, adapter)
        self._adapters[handle] = adapter

    def unbind_adapter(self, handle: int) -> None:
        """See `ops.base.Backend`."""
        assert handle in self._adapters, f"handle {handle} is not bound"
        del self._adapters[handle]

    def close(self) -> None:
        """See `ops.base.Backend`."""
        self._adapters.clear()
        self._check = None
        self._kernels = ()
        self._logits = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _opened(self) -> tuple[DeviceMemory, Layout]:
        assert self._memory is not None, "the backend is not open"
        assert self._layout is not None, "an open backend has a layout"
        return self._memory, self._layout


def _open_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"`--device {name}` is not usable here ({str(error).splitlines()[0]}); use `cpu`, or a device that "
            "`python -c 'import torch; print(torch.cuda.device_count())'` counts, such as `cuda:0`"
        ) from error
    return device


def _views(memory: DeviceMemory, layout: Layout, sizes: Sizes) -> Views:
    program, kv_dtype = sizes.program, layout.kv_format.dtype
    buffers = {
        name: memory.view(layout.buffer_offsets[name], (sizes.max_rows(name), buffer.width), TORCH_DTYPES[buffer.dtype])
        for name, buffer in program.buffers.items()
    }
    weights = {
        name: memory.view(layout.weight_offsets[name], weight.shape, TORCH_DTYPES[weight.dtype])
        for name, weight in program.weights.items()
    }
    num_elements = layout.num_pages * layout.kv_format.page_bytes // kv_dtype.itemsize
    pages = memory.view(layout.pages.offset, (num_elements,), TORCH_DTYPES[kv_dtype])
    return Views(sizes, buffers, weights, pages, layout.num_pages)


def _check_size(step: Step, limits: StepLimits) -> None:
    assert step.num_tokens <= limits.max_tokens, f"{step.num_tokens} tokens, planned for {limits.max_tokens}"
    assert step.num_samples <= limits.max_samples, f"{step.num_samples} samples, planned for {limits.max_samples}"
    assert step.num_seqs <= limits.max_seqs, f"{step.num_seqs} sequences, planned for {limits.max_seqs}"
