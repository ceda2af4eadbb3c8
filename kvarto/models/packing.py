"""Which format each matrix takes in memory: Program × file types × backend. Decided before the plan, so it is exact.

Matrices are the weights that products and embedding tables are made of. Norms, biases and position tables stay
row-major. A matrix has one part per source, so that fused projections keep what each of their files has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvarto.core.buffers import Weight, WeightPart
from kvarto.core.errors import UnsupportedModel
from kvarto.core.ops import Embed, Experts, Linear, Logits, Route
from kvarto.core.program import Program
from kvarto.core.weight_format import WeightFormat, block_columns
from kvarto.models.bands import Band, band_of
from kvarto.models.base import WeightFiles
from kvarto.models.int4_modules import UNORDERED

Keep = Callable[[str], WeightFormat | None]
"""From a file's type (`BF16`, `Q4_K`, …) to what a backend keeps for it in a matrix; None keeps matrices row-major."""


def pack_matrices(program: Program, files: WeightFiles, keep: Keep) -> Program:
    """The program with its matrices in parts, and each weight's bytes on file. `check_tensors` has passed.

    Raises UnsupportedModel for matrices that cannot be packed, and from `keep`.
    """
    matrices, weights = frozenset(matrix_names(program)), dict[str, Weight]()
    for name, weight in program.weights.items():
        bands = [band_of(source, files) for source in weight.sources]
        parts = [_part(band, files, keep) for band in bands] if name in matrices else []
        weights[name] = _with_parts(replace(weight, file_bytes=sum(band.file_bytes for band in bands)), parts)
    return replace(program, weights=weights)


def matrix_names(program: Program) -> tuple[str, ...]:
    """Weights that are matrices, in the program's order, each once."""
    names: dict[str, None] = {}
    for op in program.ops:
        if isinstance(op, Embed):
            names[op.table] = None
        elif isinstance(op, Linear | Logits | Route):
            names[op.weight] = None
        elif isinstance(op, Experts):
            names |= {op.gate_up: None, op.down: None}
    return tuple(names)


def format_names(program: Program) -> str:
    """The formats of the matrices, for people and fingerprints: `q4_1`, `q4_k+q6_k`, or the row-major type."""
    return "+".join(sorted(set(_formats(program))))


def _formats(program: Program) -> Iterator[str]:
    for name in matrix_names(program):
        weight = program.weights[name]
        for part in weight.parts:
            yield f"{part.format}-{part.group_size}" if part.group_size else str(part.format)
        if not weight.parts:
            yield str(weight.dtype)


def _with_parts(weight: Weight, parts: list[WeightPart | None]) -> Weight:
    packed = tuple(part for part in parts if part is not None)
    assert len(packed) in (0, len(parts)), f"`{weight.name}` is row-major in parts"
    return replace(weight, parts=packed)


def _part(band: Band, files: WeightFiles, keep: Keep) -> WeightPart | None:
    format = keep(band.info.file_dtype)
    if format is None:
        return None
    if band.info.file_dtype == UNORDERED and not format.is_float:
        raise UnsupportedModel(
            f"`{files.path}`: the columns of `{band.info.name}` were quantised out of order (`desc_act`, `g_idx`), and "
            "packed codes need groups of neighbours; `--dtype bf16` widens the weights instead, or quantise the model "
            "with `desc_act` false or `static_groups` true"
        )
    if format is not band.info.row_format or not band.has_raw_rows(files):
        format = _rounded(format, band.num_columns)
    group_size = band.info.group_size if format is WeightFormat.INT4 else 0
    return WeightPart(format, group_size, band.num_rows, band.info.file_dtype)


def _rounded(format: WeightFormat, num_columns: int) -> WeightFormat:
    """What float32 values are rounded to where the file's own rows cannot be kept."""
    if format.is_float:
        return format
    return WeightFormat.Q8_0 if num_columns % block_columns(WeightFormat.Q8_0) == 0 else WeightFormat.F32
