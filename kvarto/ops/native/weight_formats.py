"""What a matrix is kept in, for each type that files have."""

from __future__ import annotations

from kvarto.core.errors import UnsupportedModel
from kvarto.core.weight_format import WeightFormat

_KEPT = {format.name: format for format in WeightFormat}
_NO_WEIGHTS = ("F64", "I8", "I16", "I32", "I64")
"""Types that tensors may have and matrices of models do not."""


def kept_format(file_format: str, dtype: str) -> WeightFormat:
    """The file's own format with `dtype` `auto`, else what `dtype` names: f32, f16 or bf16.

    A quantised type without inner loops of its own is widened to codes of 8 bits; the plan names what that costs.
    Raises UnsupportedModel.
    """
    if file_format in _NO_WEIGHTS:
        raise UnsupportedModel(
            f"a matrix of type {file_format} is no weight; types are {', '.join(_KEPT)}, or GGUF's others"
        )
    if dtype != "auto":
        return WeightFormat(dtype)
    return _KEPT.get(file_format, WeightFormat.Q8_0)
