"""Sends prompts to an OpenAI-compatible server, so many at once, and notes when text comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.figures import Answer
from benchmarks.peers.launch import Launch
from benchmarks.peers.prompts import Prompt
from kvarto.cli.openai_client import OpenAIClient, ServerRefused, ServerUnreachable
from kvarto.core.errors import EngineError

ANSWER_TIMEOUT_S = 300.0
NEVER = frozenset({400, 401, 404, 422})
"""HTTP's codes of a server that is up and will not take the request later either; one that loads says 503."""


def request_body(launch: Launch, prompt: Prompt) -> dict[str, Any]:
    """Greedy, to the last token asked for, streamed."""
    return {
        **launch.addressed(prompt.adapter),
        "prompt": list(prompt.ids),
        "max_tokens": prompt.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def send(client: OpenAIClient, launch: Launch, prompt: Prompt) -> Answer:
    """One request. Raises EngineError when the server computed another number of tokens than asked for."""
    sent_s = time.perf_counter()
    first_s = last_s = None
    usage: dict[str, Any] = {}
    async for event in client.stream("/v1/completions", request_body(launch, prompt)):
        now_s = time.perf_counter()
        if any(choice.get("text") or choice.get("finish_reason") for choice in event.get("choices", ())):
            first_s = first_s or now_s
            last_s = now_s
        usage = event.get("usage") or usage
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if first_s is None or last_s is None or counted != (len(prompt.ids), prompt.num_output_tokens):
        asked = (len(prompt.ids), prompt.num_output_tokens)
        raise EngineError(f"asked for (prompt, output) tokens {asked}, the server counted {counted}")
    return Answer(len(prompt.ids), prompt.num_output_tokens, sent_s, first_s, last_s)


async def send_all(launch: Launch, prompts: Sequence[Prompt], concurrency: int) -> list[Answer]:
    """All prompts in order, `concurrency` in flight."""
    gate = asyncio.Semaphore(concurrency)
    async with OpenAIClient(launch.url, timeout_s=ANSWER_TIMEOUT_S) as client:

        async def one(prompt: Prompt) -> Answer:
            async with gate:
                return await send(client, launch, prompt)

        return list(await asyncio.gather(*map(one, prompts)))


async def is_answering(launch: Launch) -> bool:
    """Whether the server gives one token for a few. False while it starts."""
    try:
        async with OpenAIClient(launch.url, timeout_s=ANSWER_TIMEOUT_S) as client:
            await send(client, launch, Prompt((1_000, 2_000, 3_000), 1))
    except ServerUnreachable:
        return False
    except ServerRefused as error:
        if error.status in NEVER:
            raise
        return False
    return True
