"""Which instruction set runs: the best that this machine has, or the one that `KVARTO_ISA` names."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from kvarto.core import _native
from kvarto.core.errors import UsageError

VARIABLE = "KVARTO_ISA"


def choose_isa(environ: Mapping[str, str] = os.environ) -> str:
    """Raises UsageError for a set that cannot run here."""
    available = _native.ops.isas()
    asked = environ.get(VARIABLE, "")
    if not asked:
        return available[-1]
    if asked not in available:
        raise UsageError(f"`{VARIABLE}={asked}` cannot run here; these can: {', '.join(available)}")
    return asked


def arithmetic(isa: str) -> str:
    """What the bits of float32 ops depend on: all sets with fused multiply-add give the same."""
    return f"portable-{platform.machine()}" if isa == "portable" else "fma"
