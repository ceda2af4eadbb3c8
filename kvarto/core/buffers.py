"""What ops work on: activation buffers, weights, and the sizes and costs of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from kvarto.core.dtype import DType
from kvarto.core.weight_format import WeightFormat, packed_bytes

CACHE_LINE_BYTES = 64


class Rows(Enum):
    """What a buffer has one row for."""

    TOKENS = "tokens"
    SAMPLES = "samples"


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that buffers are planned for."""

    max_tokens: int
    max_seqs: int
    max_samples: int
    max_context: int
    """Tokens that one sequence may hold."""
    max_lora_rank: int = 0
    """The largest rank of an adapter's update; 0: no adapters."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """An activation: `[rows, width]`, row-major.

    Backends may leave a gap behind each row; there is room for `stride_bytes` per row.
    """

    name: str
    width: int
    rows: Rows = Rows.TOKENS
    dtype: DType = DType.F32

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize

    @property
    def stride_bytes(self) -> int:
        """From one row to the next. Rows of whole KiB get a cache line more: sixteen of them, which kernels write
        together, would else lie in four sets of a cache or less."""
        return self.row_bytes + CACHE_LINE_BYTES * (self.row_bytes % 1024 == 0)

    def size_bytes(self, limits: StepLimits) -> int:
        """Bytes at the largest step that `limits` allows."""
        return self.stride_bytes * (limits.max_tokens if self.rows is Rows.TOKENS else limits.max_samples)


class Transform(Enum):
    """What a loader does to a source tensor before storing it. Values are kept exactly."""

    NONE = "none"
    TRANSPOSE = "transpose"
    """`[in, out]` on file, `[out, in]` here (GPT-2's Conv1D)."""
    ADD_ONE = "add one"
    """Gemma stores norm weights as w - 1."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the model's files, or a band of its rows, that becomes rows of a weight."""

    name: str
    """Hugging Face name; readers of other formats give that name and layout (GGUF's permuted q and k come undone)."""
    transform: Transform = Transform.NONE
    rows: tuple[int, int] | None = None
    """Half-open band of rows of the tensor (after the transform; a vector's rows are its elements); None takes all."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A band of rows of a matrix in one format, packed in panels of 16 rows; one per source, in their order."""

    format: WeightFormat
    group_size: int
    """Columns that share a scale, of int4; 0 elsewhere."""
    num_rows: int
    """Without padding."""
    file_dtype: str = ""
    """What the model's file has for these rows (`Q4_K`, …), for people."""

    def size_bytes(self, num_columns: int) -> int:
        """Bytes in the weights region; the next part begins there."""
        return packed_bytes(self.format, self.num_rows, num_columns, self.group_size)


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant, made of its sources' rows one below the other: row-major, or packed in parts."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    """Of its elements where it is row-major; parts have their own formats."""
    sources: tuple[Source, ...]
    parts: tuple[WeightPart, ...] = ()
    """Empty where it is row-major."""
    file_bytes: int | None = None
    """Bytes of the sources' rows in the model's files; None where nobody has looked."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes; of row-major ones without alignment, of parts with all padding."""
        if self.parts:
            return sum(part.size_bytes(self.shape[-1]) for part in self.parts)
        return self.num_elements * self.dtype.itemsize

    def part_offsets(self) -> tuple[int, ...]:
        """Where each part begins, in bytes from the weight's own start."""
        ends = accumulate((part.size_bytes(self.shape[-1]) for part in self.parts), initial=0)
        return tuple(ends)[:-1]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of one step, for costs."""

    num_tokens: int
    num_samples: int
    context_tokens: int
    """KV tokens read, summed over query tokens, at full attention."""
    unique_context_tokens: int
    """KV tokens read from memory at least once: contexts summed over sequences."""

    def num_rows(self, buffer: Buffer) -> int:
        """Of the buffer in this step."""
        return self.num_tokens if buffer.rows is Rows.TOKENS else self.num_samples


@dataclass(frozen=True, slots=True)
class Cost:
    """What an op costs at one step shape."""

    flops: int
    bytes_read: int
    bytes_written: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )
