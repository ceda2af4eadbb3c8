"""The reference backend: every op in PyTorch, on any torch device. Slow and obvious; the oracle of the others.

Batch invariance, bit for bit, rests on four habits, and a test for each:

- products run in tiles of 32 rows, zero-padded, always the same call shape (`tiled_product.py`);
- sums over a row are fixed trees of elementwise additions (`sums.py`), or of one fixed shape (attention);
- pointwise functions are made of single IEEE operations and of `exp`, `tanh`, `erf`, `sin`, `cos`, `log` and `log1p`,
  on lengths padded to whole vectors: PyTorch's fused ones (`sigmoid`, `silu`, `gelu`) round a vector's tail otherwise;
- attention goes by tiles of 64 keys and spans of 1,024 by absolute position (`attention.py`).
"""

from __future__ import annotations

import os

# Between two parallel regions OpenMP's threads spin, which starves whoever shares the cores: the server, its clients,
# another engine. Measured with two cores and a load of 7: ten tokens took 34 s spinning and 5 s sleeping. The library
# reads this once, when PyTorch loads it, so it is set before the imports below.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from kvarto.ops.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
