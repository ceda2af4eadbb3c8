"""OpenVINO GenAI behind the shim: `python -m benchmarks.peers.shim.openvino_engine MODEL [FLAG...]`.

Its continuous batching knows one adapter at a time: `generate` sets it, and what is added later is computed with it,
whatever it asks for. So requests for one adapter run together, and those for another when they are done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found,unused-ignore]  # lives in the peer's environment
import openvino_genai  # type: ignore[import-not-found,unused-ignore]

from benchmarks.peers.shim.lines import Answer, Lines, Request

SOME_TOKEN = 1_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="GGUF file, or folder of OpenVINO's own format")
    parser.add_argument("--property", action="append", default=[], metavar="NAME=VALUE", help="of the CPU plugin")
    parser.add_argument("--cache-gb", type=int, default=2, help="KV cache")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--adapter", action="append", default=[], type=Path, help="PEFT folder, asked for by its name")
    parser.add_argument("--named", type=Path, help="MODEL as `openvino_names` writes it, for adapters")
    return parser.parse_args()


def adapter_configs(folders: Sequence[Path]) -> dict[str | None, Any]:
    """By name; None is the base. OpenVINO reads the matrices; the scaling is to be said."""
    configs: dict[str | None, Any] = {None: openvino_genai.AdapterConfig()}
    for folder in folders:
        config = json.loads((folder / "adapter_config.json").read_text())
        adapter = openvino_genai.Adapter(folder / "adapter_model.safetensors")
        configs[folder.name] = openvino_genai.AdapterConfig(adapter, config["lora_alpha"] / config["r"])
    return configs


def pipeline(flags: argparse.Namespace, adapters: dict[str | None, Any]) -> Any:
    """Continuous batching with room for the widest column. With adapters its prefix cache must be off."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = flags.cache_gb
    scheduler.max_num_batched_tokens = flags.max_num_batched_tokens
    scheduler.max_num_seqs = 256
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = not flags.no_prefix_caching
    properties = dict(pair.split("=", 1) for pair in flags.property)
    if not flags.adapter:
        return openvino_genai.ContinuousBatchingPipeline(flags.model, scheduler, "CPU", properties)
    every = openvino_genai.AdapterConfig()
    for config in adapters.values():
        for adapter, alpha in config.get_adapters_and_alphas():
            every.add(adapter, alpha)
    tokenizer = openvino_genai.Tokenizer(flags.model)
    return openvino_genai.ContinuousBatchingPipeline(
        flags.named, tokenizer, scheduler, "CPU", adapters=every, **properties
    )


class Engine:
    """The pipeline, and whose turn it is."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._adapters = adapter_configs(flags.adapter)
        self._pipeline = pipeline(flags, self._adapters)
        self._has_adapters = bool(flags.adapter)
        self.adapter: str | None = None
        """That all which runs is computed with."""
        if self._has_adapters:
            self._set(None)

    def turn_to(self, adapter: str | None) -> None:
        """Compute with this one from now on. Nothing may run."""
        if adapter != self.adapter:
            self._set(adapter)

    def start(self, request: Request) -> Any:
        """A handle to read tokens from. The request asks for the adapter whose turn it is."""
        return self._pipeline.add_request(request.id, _ids(request.prompt), self._config(request.max_tokens))

    def step(self) -> None:
        """Some tokens of what runs."""
        self._pipeline.step()

    def _set(self, adapter: str | None) -> None:
        """By `generate`, of one token."""
        self.adapter = adapter
        self._pipeline.generate([_ids([SOME_TOKEN])], [self._config(1)])

    def _config(self, num_tokens: int) -> Any:
        """Greedy, to the last token asked for."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._has_adapters:
            config.adapters = self._adapters[self.adapter]
        return config


def _ids(tokens: Sequence[int]) -> Any:
    return openvino.Tensor(np.array([tokens], dtype=np.int64))


def new_tokens(handle: Any) -> list[int]:
    """Tokens since the last call."""
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
    return tokens


def main() -> None:
    """Step while anything runs; the turn is that of who has waited longest, and who asks for the same joins in."""
    flags = arguments()
    lines = Lines()
    engine = Engine(flags)
    waiting: list[Request] = []
    running: dict[int, tuple[Any, int]] = {}  # handle and tokens to come
    while True:
        waiting += lines.take(is_blocking=not running and not waiting)
        if not running:
            engine.turn_to(waiting[0].adapter)
        for request in [request for request in waiting if request.adapter == engine.adapter]:
            running[request.id] = (engine.start(request), request.max_tokens)
        waiting = [request for request in waiting if request.adapter != engine.adapter]
        engine.step()
        answers = []
        for number, (handle, num_left) in list(running.items()):
            if tokens := new_tokens(handle):
                num_left -= len(tokens)
                running[number] = (handle, num_left)
                answers.append(Answer(number, tokens, num_left <= 0))
                if num_left <= 0:
                    del running[number]
        lines.give(answers)


if __name__ == "__main__":
    main()
