"""From what the command line names (`llama.cpp:q4_0 --threads 1`) to an engine, a format and flags."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from benchmarks.peers.engines.base import Engine
from benchmarks.peers.engines.hf import Transformers
from benchmarks.peers.engines.kvarto import Kvarto
from benchmarks.peers.engines.llama_cpp import LlamaCpp
from benchmarks.peers.engines.openvino import OpenVino
from benchmarks.peers.engines.vllm import Vllm
from benchmarks.peers.folders import Folders
from benchmarks.peers.server_process import Launch, free_port
from kvarto.core.errors import UsageError

_ALL: tuple[Engine, ...] = (Kvarto(), LlamaCpp(), OpenVino(), Vllm(), Transformers())
ENGINES = {engine.name: engine for engine in _ALL}


@dataclass(frozen=True, slots=True)
class ServerName:
    """One server to measure, as the command line writes it."""

    engine: Engine
    weights: str
    flags: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ServerName:
        """`ENGINE[:FORMAT] [FLAG...]`. Raises UsageError for an engine or a format that is not there."""
        head, *flags = shlex.split(text) or [""]
        name, _, weights = head.partition(":")
        if name not in ENGINES:
            raise UsageError(f"`{text}`: no engine `{name}`; there are {', '.join(ENGINES)}")
        engine = ENGINES[name]
        if weights and weights not in engine.formats:
            raise UsageError(f"`{text}`: `{name}` is measured in {', '.join(engine.formats)}")
        return cls(engine, weights or engine.formats[0], tuple(flags))

    def launch(self, folders: Folders) -> Launch:
        """On a free port."""
        return self.engine.launch(folders, self.weights, free_port(), self.flags)
