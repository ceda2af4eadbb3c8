"""`kvarto pull MODEL`: fetch a model, and print where it lies."""

from __future__ import annotations

import sys


def pull(model: str = "demo", /) -> None:
    """Download a model into the local cache.

    Parameters
    ----------
    model
        A hub id (`org/name`, `org/name:Q4_K_M`; `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` apply), or
        `demo`. Downloads resume where they stopped.
    """
    from kvarto.models.hub import resolve

    print(resolve(model, lambda line: print(line, file=sys.stderr)))
