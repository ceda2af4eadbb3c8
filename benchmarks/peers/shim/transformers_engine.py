"""`transformers` behind the shim: `python -m benchmarks.peers.shim.transformers_engine FOLDER`.

What waits becomes one batch, padded on the left, that runs until its longest answer is whole; the loop is greedy and
keeps K and V between steps. That is faster than `generate`, which asks more of Python at every token.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

from benchmarks.peers.shim.lines import Answer, Lines, Request

MAX_BATCH = 32


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


@torch.inference_mode()
def main() -> None:
    """Batch after batch."""
    lines = Lines()
    reading = {"dtype": "auto", "attn_implementation": "sdpa"}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **reading)
    model.eval()
    waiting: list[Request] = []
    while True:
        waiting += lines.take(is_blocking=not waiting)
        batch, waiting = Batch(model, waiting[:MAX_BATCH]), waiting[MAX_BATCH:]
        while not batch.is_whole:
            lines.give(batch.step())


if __name__ == "__main__":
    main()
