"""What /v1/completions and /v1/chat/completions have in common: how an answer begins, is counted and is sent.

An `Answer` turns the engine's outputs into parts of its API's shape. A stream sends the parts as they come; a whole
answer joins them, so both say the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec
from fastapi import Request
from starlette.responses import Response

from kvarto.core.errors import InvalidRequest
from kvarto.core.sampling import SamplingParams
from kvarto.engine.generation import Generation
from kvarto.engine.outputs import ChoiceOutput
from kvarto.server.errors import CLIENT_GONE
from kvarto.server.event_stream import PING_S, EventStream, event, unless_gone
from kvarto.server.protocol import PromptTokensDetails, SamplingFields, StreamOptions, Usage
from kvarto.server.service import Service
from kvarto.server.text_chunk import TextChunk


class Answer(ABC):
    """One request while it is answered."""

    id_prefix: str

    def __init__(self, service: Service, fields: SamplingFields, prompts: Sequence[Sequence[int]]) -> None:
        self.service = service
        self.n = fields.n or 1
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = service.model.name if fields.model is None else fields.model
        self.options = fields.stream_options or StreamOptions()
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._text_chunks: dict[int, TextChunk] = {}
        """By choice, once it has begun."""

    @abstractmethod
    def chunk(self, output: ChoiceOutput) -> msgspec.Struct | None:
        """A part of the stream; None when there is nothing to say yet."""

    @abstractmethod
    def text_chunk(self, index: int, text: str) -> msgspec.Struct | None:
        """A chunk that says of a choice nothing but new text; None for requests whose chunks always say more."""

    @abstractmethod
    def usage_chunk(self) -> msgspec.Struct:
        """The last part of a stream that was asked for usage."""

    @abstractmethod
    def whole(self, outputs: Sequence[ChoiceOutput]) -> msgspec.Struct:
        """The answer as one object."""

    def index_of(self, output: ChoiceOutput) -> int:
        """Choice c of prompt p has the index p * n + c."""
        return output.prompt_index * self.n + output.choice

    def event(self, output: ChoiceOutput) -> bytes:
        """An output as it is streamed; nothing when there is nothing to say yet."""
        index = self.index_of(output)
        if output.is_plain and index in self._text_chunks:
            self._num_completion_tokens += len(output.token_ids)
            return self._text_chunks[index].event(output.text) if output.text else b""
        self.count(output)
        chunk = self.chunk(output)
        if chunk is None:
            return b""
        if output.finish_reason is None and index not in self._text_chunks:
            self._keep_text_chunk(index)
        return event(chunk)

    def _keep_text_chunk(self, index: int) -> None:
        """From now on a plain output is encoded by what stands around its text, if that stays the same."""
        empty = self.text_chunk(index, "")
        if empty is not None and not self.options.continuous_usage_stats:
            self._text_chunks[index] = TextChunk(empty)

    def count(self, output: ChoiceOutput) -> None:
        """Add an output to the usage."""
        self._num_completion_tokens += len(output.token_ids)
        self._num_cached_tokens += output.num_cached_tokens or 0

    def usage(self) -> Usage:
        """Of what was counted so far."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self._num_cached_tokens),
        )

    @property
    def running_usage(self) -> Usage | msgspec.UnsetType | None:
        """For a chunk: the usage so far, null where only the last chunk carries it, or no field at all."""
        if self.options.continuous_usage_stats:
            return self.usage()
        return None if self.options.include_usage else msgspec.UNSET


def submit(
    service: Service, prompts: Sequence[Sequence[int]], sampling: SamplingParams, fields: SamplingFields
) -> Generation:
    """Hand prompts to the engine. Raises RequestError; then nothing was queued."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("`stream_options` needs `stream` to be true", param="stream_options")
    return service.engine.submit(
        prompts,
        sampling,
        cache_salt=fields.cache_salt,
        priority=fields.priority or 0,
        adapter=service.adapter_of(fields.model),
    )


async def respond(request: Request, answer: Answer, generation: Generation, *, is_stream: bool | None) -> Response:
    """Send the answer, or cancel the generation when its client leaves or something fails."""
    try:
        if is_stream:
            if await unless_gone(request.receive, _opens(generation)):
                return EventStream(AnswerEvents(answer, generation), generation.cancel)
        else:
            outputs = await unless_gone(request.receive, _collect(generation))
            if outputs is not None:
                return _whole(answer, outputs)
    except BaseException:
        generation.cancel()
        raise
    generation.cancel()
    return Response(status_code=CLIENT_GONE)


async def _collect(generation: Generation) -> list[ChoiceOutput]:
    return [output async for output in generation]


async def _opens(generation: Generation) -> bool:
    """The stream opens with the first tokens, so that a refusal by the engine still has its own status.

    It opens without any after a while, because from then on it must be kept alive with pings.
    """
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(generation.arrival(), PING_S)
    return True


class AnswerEvents:
    """The events of a streamed answer, as its generation yields outputs."""

    def __init__(self, answer: Answer, generation: Generation) -> None:
        self._answer = answer
        self._generation = generation

    def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` when outputs came."""
        self._generation.listen(on_news)

    def take(self) -> tuple[bytes, bool]:
        """Events of the outputs that came since the last call, and whether everything has ended, well or not."""
        events = [self._answer.event(output) for output in self._generation.take()]
        return b"".join(events), self._generation.is_over

    def tail(self) -> bytes:
        """The usage, if asked for. Raises what failed."""
        self._generation.check()
        return event(self._answer.usage_chunk()) if self._answer.options.include_usage else b""


def _whole(answer: Answer, outputs: Sequence[ChoiceOutput]) -> Response:
    for output in outputs:
        answer.count(output)
    return Response(msgspec.json.encode(answer.whole(outputs)), media_type="application/json")
