"""From what the command line names (`vllm:f32 OMP_NUM_THREADS=1 --seed 1`) to an engine, a format and flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from benchmarks.peers.engines.base import AdapterUse, Engine
from benchmarks.peers.engines.hf import Transformers
from benchmarks.peers.engines.kvarto import Kvarto
from benchmarks.peers.engines.llama_cpp import LlamaCpp
from benchmarks.peers.engines.openvino import OpenVino
from benchmarks.peers.engines.vllm import Vllm
from benchmarks.peers.folders import Folders
from benchmarks.peers.launch import Launch, free_port
from kvarto.core.errors import UsageError

_ALL: tuple[Engine, ...] = (Kvarto(), LlamaCpp(), OpenVino(), Vllm(), Transformers())
ENGINES = {engine.name: engine for engine in _ALL}
ADAPTERS_FOLDER = "{adapters}"
"""In a flag: the folder with the adapters, for who says all flags about them himself."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=.*")


@dataclass(frozen=True, slots=True)
class ServerName:
    """One server to measure, as the command line writes it."""

    engine: Engine
    weights: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ServerName:
        """`ENGINE[:FORMAT] [VARIABLE=VALUE...] [FLAG...]`. Raises UsageError for what is not there."""
        head, *words = shlex.split(text) or [""]
        variables = list(takewhile(_VARIABLE.fullmatch, words))
        name, _, weights = head.partition(":")
        if name not in ENGINES:
            raise UsageError(f"`{text}`: no engine `{name}`; there are {', '.join(ENGINES)}")
        engine = ENGINES[name]
        if weights and weights not in engine.formats:
            raise UsageError(f"`{text}`: `{name}` is measured in {', '.join(engine.formats)}")
        environment = dict(variable.split("=", 1) for variable in variables)
        return cls(engine, weights or engine.formats[0], tuple(words[len(variables) :]), environment)

    def launch(self, folders: Folders, adapters: Sequence[str] = ()) -> Launch:
        """On a free port. With adapters the engine's own flags for them come first, unless `{adapters}` is in ours."""
        flags = tuple(flag.replace(ADAPTERS_FOLDER, str(folders.adapters)) for flag in self.flags)
        use = self.engine.adapter_use(folders, self.weights, adapters) if adapters else AdapterUse((), {})
        added = use.flags if flags == self.flags else ()
        launch = self.engine.launch(folders, self.weights, free_port(), (*added, *flags))
        variables = (f"{name}={value}" for name, value in self.environment.items())
        words = (launch.label, *(["+adapters"] if added else ()), *flags, *variables)
        environment = {**launch.environment, **self.environment}
        return replace(launch, label=" ".join(words), environment=environment, adapters=use.fields)
