"""From files of adapters to the bytes of their pages. What the fields mean: native/adapters/pack_plan.h."""

import numpy as np
from numpy.typing import NDArray

def can_hash_pages(isa: str) -> bool: ...
def hash_pages(
    isa: str,
    point: bytes,
    region: NDArray[np.uint8],
    page_bytes: int,
    pages: NDArray[np.int32],
    hashes: NDArray[np.uint8],
) -> None: ...

class FileTensor:
    def __init__(
        self,
        offset: int,
        num_rows: int,
        num_columns: int,
        start: int,
        type: int,
        strips: int,
        is_transposed: bool,
        is_beside: bool,
        num_heads: int,
    ) -> None: ...

class PackPlan:
    def __init__(self, tensors: list[FileTensor], file_bytes: int, stream_bytes: int, beside_bytes: int) -> None: ...
    def pack(
        self,
        isa: str,
        file: int,
        region: NDArray[np.uint8],
        page_bytes: int,
        pages: NDArray[np.int32],
        beside: NDArray[np.uint8],
        may_be_direct: bool,
    ) -> tuple[tuple[int, bool] | None, int]: ...
