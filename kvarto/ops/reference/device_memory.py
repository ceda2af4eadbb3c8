"""DeviceMemory: the device arena as bytes that torch and numpy see. On a CPU it is an `Arena`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvarto.core.layout import Region
from kvarto.memory.arena import Arena


class DeviceMemory:
    """`size_bytes` bytes on a torch device, zero at first."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.arena = Arena(size_bytes) if device.type == "cpu" else None
        """None on other devices, where PyTorch allocates."""
        if self.arena is not None:
            self.bytes = torch.from_numpy(self.arena.array)
        else:
            self.bytes = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes from `offset` on."""
        size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.bytes[offset : offset + size_bytes].view(dtype).view(shape)

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes in."""
        target = self.bytes[offset : offset + len(data)]
        if self.arena is not None:
            np.copyto(target.numpy(), data)
        else:
            target.copy_(torch.from_numpy(np.ascontiguousarray(data)))

    def copy_item(self, region: Region, item_bytes: int, source: int, target: int) -> None:
        """Copy one of a region's equal items over another. numpy: a copy thread should not start torch's threads."""
        items = self.bytes[region.offset : region.end].view(-1, item_bytes)
        if self.arena is not None:
            np.copyto(items[target].numpy(), items[source].numpy())
        else:
            items[target].copy_(items[source])

    def close(self) -> None:
        """Give the memory back. Tensors over it must be gone or unused."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self.arena is not None:
            self.arena.close()
