"""How many bytes do an adapter's pages waste, cut where a page ends, against whole tiles placed best-fit?

    python -m benchmarks.adapters.packing

Best-fit: tiles of 512 columns and the rests, largest first, each into the fullest page that has room for it.
Sizes only: bfloat16 adapters on all linears; pages of 1 to 32 tokens of the model's own KV. Ours takes
bytes / page_bytes, rounded up, and no packing takes fewer pages. Times are of `pack`: process time, medians.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter

from kvarto.adapters.packing import TILE_COLUMNS, Strips, num_pages, pack
from kvarto.core.strip_type import StripType

RANKS = (8, 64)
ROUNDS = 5


def _linears(hidden: int, kv_width: int, ffn: int) -> tuple[tuple[int, int], ...]:
    up, down = (hidden, ffn), (ffn, hidden)
    return (hidden, hidden), (hidden, kv_width), (hidden, kv_width), (hidden, hidden), up, up, down


MODELS = {
    "Llama-3-8B": (32, 131_072, _linears(4096, 1024, 14336)),
    "Qwen2.5-0.5B": (24, 12_288, _linears(896, 128, 4864)),
    "SmolLM2-135M": (30, 23_040, _linears(576, 192, 1536)),
    "SmolLM2-360M": (32, 40_960, _linears(960, 320, 2560)),
}
"""Layers, bytes of KV per token, and (in, out) of the linears of a layer."""


def matrices(model: str, rank: int) -> list[Strips]:
    """A and B of every linear."""
    layers, _, linears = MODELS[model]
    return [Strips(rank, width, StripType.BF16) for _ in range(layers) for linear in linears for width in linear]


def best_fit_pages(strips: list[Strips], page_bytes: int) -> int:
    """Pages that whole tiles take. Pages with equal room are one entry, so equal tiles are placed in runs."""
    sizes: Counter[int] = Counter()
    for strip in strips:
        whole, rest = divmod(strip.num_columns, TILE_COLUMNS)
        sizes[strip.type.size_bytes(TILE_COLUMNS)] += strip.num_strips * whole
        sizes[strip.type.size_bytes(rest)] += strip.num_strips if rest else 0
    rooms: Counter[int] = Counter()
    pages = 0
    for size, count in sorted(sizes.items(), reverse=True):
        for room in sorted(rooms):
            used = min(rooms[room] * (room // size), count) if size and room >= size else 0
            if used:
                count -= used
                full, rest = divmod(used, room // size)
                rooms[room] -= full + (rest > 0)
                rooms[room % size] += full
                rooms[room - rest * size] += rest > 0
        if count:
            full, rest = divmod(count, page_bytes // size)
            pages += full + (rest > 0)
            rooms[page_bytes % size] += full
            rooms[page_bytes - rest * size] += rest > 0
    return pages


def main() -> None:
    """Print the table."""
    worst = {"ours": 0.0, "best-fit": 0.0}
    print(f"{'model':>14} {'rank':>4} {'page KiB':>9} {'tiles':>9} {'pack ms':>8} {'ours %':>7} {'best-fit %':>10}")
    for model, (_, token_bytes, _) in MODELS.items():
        for rank in RANKS:
            strips = matrices(model, rank)
            size_bytes = sum(strip.size_bytes for strip in strips)
            for tokens in (1, 4, 16, 32):
                page_bytes = -(-token_bytes * tokens // 4096) * 4096
                times = []
                for _ in range(ROUNDS):
                    start = time.process_time()
                    packing = pack(strips, page_bytes)
                    times.append(time.process_time() - start)
                best_fit = best_fit_pages(strips, page_bytes)
                waste = {
                    "ours": packing.num_pages * page_bytes / size_bytes - 1,
                    "best-fit": best_fit * page_bytes / size_bytes - 1,
                }
                assert packing.num_pages == num_pages(size_bytes, page_bytes)
                worst = {name: max(worst[name], waste[name]) for name in worst}
                print(
                    f"{model:>14} {rank:>4} {page_bytes / 1024:>9.0f} {packing.num_tiles:>9,} "
                    f"{statistics.median(times) * 1e3:>8.1f} {waste['ours']:>7.2%} {waste['best-fit']:>10.2%}"
                )
    print(json.dumps({"benchmark": "adapters.packing", "worst_waste": {k: round(v, 4) for k, v in worst.items()}}))


if __name__ == "__main__":
    main()
