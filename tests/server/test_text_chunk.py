"""What is streamed is what the plain encoding of each chunk gives, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.engine.messages import TokenLogprobs
from kvarto.engine.outputs import ChoiceOutput
from kvarto.engine.token_table import TokenTable
from kvarto.server.answer import Answer
from kvarto.server.chat import ChatAnswer
from kvarto.server.completions import CompletionAnswer
from kvarto.server.event_stream import event
from kvarto.server.protocol import (
    ChatChunk,
    ChatRequest,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Delta,
    StreamOptions,
)
from kvarto.server.text_chunk import TextChunk
from tests.server.running import ByteTokenizer

NAMES = st.sampled_from(["m", '"text":""', '""', "a\\", 'é"content":""', "\n"])
TEXTS = st.text(max_size=6) | st.sampled_from(["", '"', '""', "\\", "\x00", "\x7f", "\u2028", "🌊", "</script>"])


@given(name=NAMES, text=TEXTS, usage=st.sampled_from([None, msgspec.UNSET]))
def test_a_text_chunk_is_the_chunk(name: str, text: str, usage: Any) -> None:
    def completion(text: str) -> Completion:
        return Completion(id="i", created=1, model=name, choices=[CompletionChoice(index=3, text=text)], usage=usage)

    def chat(text: str) -> ChatChunk:
        choice = ChunkChoice(index=3, delta=Delta(content=text))
        return ChatChunk(id="i", created=1, model=name, choices=[choice], usage=usage)

    for chunk in (completion, chat):
        assert TextChunk(chunk("")).event(text) == event(chunk(text))


def test_a_chunk_without_a_place_for_text_is_refused() -> None:
    with pytest.raises(AssertionError):
        TextChunk(ChatChunk(id="i", created=1, model="m", choices=[]))


def answer_to(kind: type[Answer], options: dict[str, Any]) -> Answer:
    service: Any = SimpleNamespace(model=SimpleNamespace(name="m", tokens=TokenTable(ByteTokenizer())))
    options = {**options, "stream_options": StreamOptions(**options["stream_options"])}
    answer: Answer
    if kind is CompletionAnswer:
        answer = CompletionAnswer(service, CompletionRequest(prompt=[[1], [2]], **options), [[1], [2]])
    else:
        logprobs = options.pop("logprobs") is not None
        answer = ChatAnswer(service, ChatRequest(messages=[], logprobs=logprobs, **options), [1])
    answer.id, answer.created = "i", 1
    return answer


OPTIONS = st.fixed_dictionaries(
    {
        "n": st.just(2),
        "logprobs": st.sampled_from([None, None, 1]),
        "prompt_logprobs": st.sampled_from([None, 1]),
        "stream_options": st.fixed_dictionaries(
            {"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
        ),
    }
)
STEPS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), TEXTS, st.integers(0, 3)), max_size=30)


def outputs_of(kind: type[Answer], options: dict[str, Any], steps: Sequence[tuple[int, int, str, int]]) -> Any:
    """What an engine may say: the first output of a prompt counts cached tokens, the last of a choice has a reason."""
    begun: set[int] = set()
    last = {(prompt, choice): index for index, (prompt, choice, _, _) in enumerate(steps)}
    for index, (prompt, choice, text, num_tokens) in enumerate(steps):
        prompt_index = prompt if kind is CompletionAnswer else 0
        ends = last[prompt, choice] == index and kind is CompletionAnswer
        entries = tuple(TokenLogprobs(97, -0.5, ((97, -0.5),)) for _ in range(num_tokens))
        yield ChoiceOutput(
            prompt_index=prompt_index,
            choice=choice,
            text=text,
            token_ids=(97,) * num_tokens,
            logprobs=None if options["logprobs"] is None else entries,
            prompt_logprobs=() if options["prompt_logprobs"] is not None and prompt_index not in begun else None,
            num_cached_tokens=3 if prompt_index not in begun else None,
            finish_reason="stop" if ends else None,
            stop_reason="#" if ends else None,
        )
        begun.add(prompt_index)


@settings(deadline=None)
@given(kind=st.sampled_from([CompletionAnswer, ChatAnswer]), options=OPTIONS, steps=STEPS)
def test_a_stream_says_what_its_chunks_say(
    kind: type[Answer], options: dict[str, Any], steps: list[tuple[int, int, str, int]]
) -> None:
    answer, plain = answer_to(kind, options), answer_to(kind, options)
    for output in outputs_of(kind, options, steps):
        plain.count(output)
        chunk = plain.chunk(output)
        assert answer.event(output) == (b"" if chunk is None else event(chunk))
    assert event(answer.usage_chunk()) == event(plain.usage_chunk())
