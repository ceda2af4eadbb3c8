"""The exact search for offsets."""

def search_offsets(
    buffers: list[tuple[int, int, int]], capacity: int, time_limit_s: float
) -> tuple[list[int] | None, bool, int]: ...
