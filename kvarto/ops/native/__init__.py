"""The native backend: a Program compiled into one call of C++ per step. Needs no PyTorch.

The module `kvarto.core._native` does the work; here are the decisions: which instruction set runs, what is multiplied
in 8 bits, which buffers lie quantised, how much scratch the ops need, and where everything lies in the arena.
"""

from __future__ import annotations

from kvarto.ops.native.backend import NativeBackend

__all__ = ["NativeBackend"]
