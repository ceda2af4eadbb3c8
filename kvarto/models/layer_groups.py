"""Which layers share a page.

Layers that keep the same tokens (full attention, or one window) may share a page, and every page of the process has
the same bytes. So each class of layers is cut into groups of one size; the largest size that wastes little wins, as
larger pages move faster between tiers.

    22 sliding + 4 full layers, size 4:  [....][....][....][....][....][..__]  [....]   2 of 28 slots wasted: too many
                                size 2:  11 x [..]                             2 x [..]  none
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.core.kv_format import LayerGroup
from kvarto.core.ops import HeadShape
from kvarto.core.units import ceil_div

MAX_PADDING_FRACTION = 0.05
"""Of all layer slots. One layer per group wastes none, so a size always exists."""


def group_layers(windows: Sequence[int | None], heads: HeadShape) -> tuple[LayerGroup, ...]:
    """Groups that hold every layer once, in order; full attention first, then by window."""
    classes: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        classes.setdefault(window, []).append(layer)
    num_slots = _num_layer_slots([len(layers) for layers in classes.values()])
    groups = []
    for window in sorted(classes, key=lambda window: window or 0):
        layers = classes[window]
        for first in range(0, len(layers), num_slots):
            members = tuple(layers[first : first + num_slots])
            groups.append(LayerGroup(members, num_slots, heads.num_kv_heads, heads.head_dim, window))
    return tuple(groups)


def num_padding_slots(groups: Sequence[LayerGroup]) -> int:
    """Layer slots that no layer uses."""
    return sum(group.num_layer_slots - len(group.layers) for group in groups)


def _num_layer_slots(class_sizes: Sequence[int]) -> int:
    num_layers = sum(class_sizes)
    for num_slots in range(max(class_sizes), 1, -1):
        total = sum(ceil_div(size, num_slots) * num_slots for size in class_sizes)
        if total - num_layers <= MAX_PADDING_FRACTION * total:
            return num_slots
    return 1
