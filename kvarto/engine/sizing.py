"""What a server will need on another machine: planned here, whatever this one has. For `kvarto k8s`."""

from __future__ import annotations

import msgspec

from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.engine.assemble import open_program
from kvarto.engine.config import EngineConfig
from kvarto.engine.settings import open_backend, plan_for_load, step_limits

NO_DEVICE = "meta"
"""PyTorch's device without memory: it sizes like a GPU that is not here."""


def size_engine(config: EngineConfig, tokens_per_seq: int | None = None) -> tuple[Program, Layout]:
    """The layout that holds `max_num_seqs` sequences of so many tokens each, by default the longest that may come.

    Nothing is reserved, and `config.device` need not be here. Raises KvartoError for what can't be served.
    """
    if config.device != "cpu":
        config = msgspec.structs.replace(config, device=NO_DEVICE)
    backend = open_backend(config)
    files, program = open_program(config, backend)
    files.close()
    num_tokens = step_limits(config, program).max_context if tokens_per_seq is None else tokens_per_seq
    return program, plan_for_load(config, program, backend, num_tokens)
