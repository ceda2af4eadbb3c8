"""Sends a workload to a server and times every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvarto.cli.load.workload import PromptIds, Workload
from kvarto.cli.openai_client import OpenAIClient
from kvarto.core.errors import KvartoError, UsageError

VOCABULARY_TEXT = (
    "A quarto is a sheet of paper folded twice, so that it makes four leaves and eight pages. Printers of old books "
    "liked its size: large enough to read by a window, small enough to carry in a coat. Numbers such as 0 1 2 3 4 5 6 "
    "7 8 9, names like Ada, Grace and Emmy, and words from many a trade keep this text from being too even."
)


@dataclass(slots=True)
class Answer:
    """One request: what was asked and when its pieces came, in seconds of the run's clock."""

    num_prompt_tokens: int
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """Arrival of each piece of text."""
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How to send."""

    model: str
    """Asked by the requests whose workload names nobody."""
    max_concurrency: int | None
    temperature: float = 0.0
    ignore_eos: bool = True


async def find_vocabulary(client: OpenAIClient, model: str) -> list[int]:
    """Ids that the server's tokenizer makes of plain text. Raises UsageError when it can't be asked."""
    try:
        body = {"model": model, "prompt": VOCABULARY_TEXT, "add_special_tokens": False}
        answer = await client.post("/tokenize", body)
        return list(answer["tokens"])
    except (KvartoError, KeyError, TypeError) as error:
        raise UsageError(f"the server has no `/tokenize` to make prompts of an exact length with: {error}") from error


async def run_load(
    client: OpenAIClient,
    workload: Workload,
    prompts: PromptIds,
    settings: LoadSettings,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> tuple[list[Answer], float]:
    """Every answer in the workload's order, and the seconds from the first request to the last answer."""
    gate = asyncio.Semaphore(settings.max_concurrency or len(workload) or 1)
    began_s = time.perf_counter()
    answers = [Answer(int(num_tokens)) for num_tokens in workload.num_prompt_tokens]

    async def ask(request: int) -> None:
        async with gate:
            await _ask(client, workload, prompts, settings, request, answers[request])
            on_answer(answers[request])

    async with asyncio.TaskGroup() as group:
        for request in range(len(workload)):
            await _wait_until(began_s, workload, request)
            group.create_task(ask(request))
    return answers, time.perf_counter() - began_s


async def _wait_until(began_s: float, workload: Workload, request: int) -> None:
    if workload.arrival_s is None:
        return
    delay_s = began_s + float(workload.arrival_s[request]) - time.perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


async def _ask(client: OpenAIClient, workload: Workload, prompts: PromptIds, settings: LoadSettings, request: int,
               answer: Answer) -> None:  # fmt: skip
    body = {
        "model": settings.model if workload.models is None else workload.models[request],
        "prompt": prompts.prompt(workload, request),
        "max_tokens": int(workload.num_output_tokens[request]),
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer.sent_s = time.perf_counter()
    try:
        async for event in client.stream("/v1/completions", body):
            _take(answer, event)
    except KvartoError as error:
        answer.error = str(error)


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if any(choice.get("text") for choice in event.get("choices", ())):
        answer.token_s.append(time.perf_counter())
    usage = event.get("usage")
    if usage:
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_output_tokens = usage["completion_tokens"]
        answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
