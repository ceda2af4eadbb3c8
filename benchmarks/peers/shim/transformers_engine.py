"""`transformers` behind the shim: `python -m benchmarks.peers.shim.transformers_engine FOLDER [--adapter FOLDER]...`.

What waits becomes one batch, padded on the left, that runs until its longest answer is whole; the loop is greedy and
keeps K and V between steps. That is faster than `generate`, which asks more of Python at every token. Adapters are
PEFT's, all in one model, and rows of a batch ask different ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.peers.shim.lines import Answer, Lines, Request

MAX_BATCH = 32
BASE = "__base__"
"""What PEFT calls a row without an adapter."""


class Batch:
    """Some requests that are computed together."""

    def __init__(self, model: Any, requests: list[Request]) -> None:
        self._model = model
        self._requests = requests
        self._num_done = 0
        width = max(len(request.prompt) for request in requests)
        self._ids = torch.zeros(len(requests), width, dtype=torch.long)
        self._mask = torch.zeros(len(requests), width, dtype=torch.long)
        for row, request in enumerate(requests):
            self._ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            self._mask[row, width - len(request.prompt) :] = 1
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache: Any = None

    def step(self) -> list[Answer]:
        """One token for each request that is not whole."""
        mask = None if bool(self._mask.all()) else self._mask  # without padding the kernel needs no mask
        output = self._model(input_ids=self._ids, attention_mask=mask, position_ids=self._positions,
                             past_key_values=self._cache, use_cache=True, logits_to_keep=1)  # fmt: skip
        self._cache = output.past_key_values
        self._ids = output.logits[:, -1].argmax(-1, keepdim=True)
        self._positions = self._positions[:, -1:] + 1
        self._mask = torch.cat([self._mask, torch.ones(len(self._requests), 1, dtype=torch.long)], dim=1)
        self._num_done += 1
        return [
            Answer(request.id, [int(token)], self._num_done == request.max_tokens)
            for request, token in zip(self._requests, self._ids[:, 0], strict=True)
            if self._num_done <= request.max_tokens
        ]

    @property
    def is_whole(self) -> bool:
        """Whether every request has its tokens."""
        return self._num_done >= max(request.max_tokens for request in self._requests)


class BareModel:
    """No adapters."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def asked(self, requests: Sequence[Request]) -> AbstractContextManager[None]:
        """Nothing differs."""
        return nullcontext()


class AdaptedModel:
    """One model that holds all adapters; `model` computes with those of the rows that are `asked`."""

    def __init__(self, base: Any, folders: Sequence[Path]) -> None:
        from peft import PeftModel

        # PEFT would widen 16-bit adapters to float32, and every row of theirs with them.
        reading = {"autocast_adapter_dtype": False}
        first, *others = folders
        self._peft: Any = PeftModel.from_pretrained(base, first, adapter_name=first.name, **reading)
        for folder in others:
            self._peft.load_adapter(folder, adapter_name=folder.name, **reading)
        self._peft.eval()
        self.model = self._peft.get_base_model()

    def asked(self, requests: Sequence[Request]) -> AbstractContextManager[None]:
        """While it is open, each row goes through its request's adapter: what `generate(adapter_names=…)` opens."""
        names = [request.adapter or BASE for request in requests]
        if set(names) == {BASE}:
            disabled: AbstractContextManager[None] = self._peft.disable_adapter()
            return disabled
        hooked: AbstractContextManager[None] = self._peft._enable_peft_forward_hooks(adapter_names=names)
        return hooked


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--adapter", action="append", default=[], type=Path, help="PEFT folder, asked for by its name")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Batch after batch."""
    flags, lines = arguments(), Lines()
    reading = {"dtype": "auto", "attn_implementation": "sdpa"}
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(flags.model, **reading)
    base.eval()
    served = AdaptedModel(base, flags.adapter) if flags.adapter else BareModel(base)
    waiting: list[Request] = []
    while True:
        waiting += lines.take(is_blocking=not waiting)
        requests, waiting = waiting[:MAX_BATCH], waiting[MAX_BATCH:]
        batch = Batch(served.model, requests)
        with served.asked(requests):
            while not batch.is_whole:
                lines.give(batch.step())


if __name__ == "__main__":
    main()
