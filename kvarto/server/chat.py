"""POST /v1/chat/completions: a conversation, answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from fastapi import Request
from starlette.responses import Response

from kvarto.core.errors import ContextLengthExceeded, InvalidRequest
from kvarto.engine.outputs import ChoiceOutput
from kvarto.server.answer import Answer, respond, submit
from kvarto.server.logprobs import chat_logprobs, prompt_logprobs
from kvarto.server.prompts import truncated
from kvarto.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    Delta,
    Usage,
)
from kvarto.server.sampling import sampling_params
from kvarto.server.service import Service


class ChatAnswer(Answer):
    """`n` answers to one conversation."""

    id_prefix = "chatcmpl"

    def __init__(self, service: Service, body: ChatRequest, prompt: Sequence[int]) -> None:
        super().__init__(service, body, [prompt])
        self._body = body
        self._begun: set[int] = set()

    def chunk(self, output: ChoiceOutput) -> ChatChunk | None:
        """The new part of one answer; its first part names the role."""
        is_first = output.choice not in self._begun
        logprobs = self._logprobs(output)
        if not (is_first or output.text or logprobs or output.finish_reason):
            return None
        self._begun.add(output.choice)
        delta = Delta(role="assistant" if is_first else None, content=output.text if output.text or is_first else None)
        choice = ChunkChoice(
            index=output.choice,
            delta=delta,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        return self._chunk([choice], self.running_usage)

    def text_chunk(self, index: int, text: str) -> ChatChunk | None:
        """One that has only text."""
        if self._body.logprobs:
            return None
        return self._chunk([ChunkChoice(index=index, delta=Delta(content=text))], self.running_usage)

    def usage_chunk(self) -> ChatChunk:
        """Usage and no choices."""
        return self._chunk([], self.usage())

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def whole(self, outputs: Sequence[ChoiceOutput]) -> ChatCompletion:
        """All answers, each joined from its parts."""
        by_choice: list[list[ChoiceOutput]] = [[] for _ in range(self.n)]
        for output in outputs:
            by_choice[output.choice].append(output)
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(of_choice) for of_choice in by_choice],
            usage=self.usage(),
        )
        asked = by_choice[0][0].prompt_logprobs if by_choice[0] else None
        if asked is not None:
            answer.prompt_logprobs = prompt_logprobs(self.service.model.tokens, asked)
        return answer

    def _choice(self, outputs: Sequence[ChoiceOutput]) -> ChatChoice:
        last = outputs[-1]
        parts = [part for output in outputs if (part := self._logprobs(output)) is not None]
        return ChatChoice(
            index=last.choice,
            message=ChatMessage(content="".join(output.text for output in outputs)),
            logprobs=ChatLogprobs([entry for part in parts for entry in part.content]) if self._body.logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )

    def _logprobs(self, output: ChoiceOutput) -> ChatLogprobs | None:
        if not self._body.logprobs or not output.logprobs:
            return None
        return chat_logprobs(self.service.model.tokens, output.logprobs)


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Answer POST /v1/chat/completions."""
    body = await service.bodies.read(request, ChatRequest)
    service.adapter_of(body.model)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_params(
        body, service.model.sampling_defaults, max_tokens=max_tokens, logprobs=_num_logprobs(body)
    )
    limit = service.engine.ready.max_model_len
    encoded = await service.prompts.from_messages(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        template_kwargs=body.chat_template_kwargs,
        max_model_len=limit if body.truncate_prompt_tokens is None else None,
    )
    prompt = truncated(encoded, body.truncate_prompt_tokens, limit, max_tokens)
    with _names_as_sent(body):
        generation = submit(service, [prompt], sampling, body)
    return await respond(request, ChatAnswer(service, body, prompt), generation, is_stream=body.stream)


def _num_logprobs(body: ChatRequest) -> int | None:
    """Chat asks for log-probabilities with a switch and a number."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


@contextmanager
def _names_as_sent(body: ChatRequest) -> Iterator[None]:
    """The engine's door says `logprobs` and `max_tokens`, which a chat may have called otherwise."""
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        yield
    except (InvalidRequest, ContextLengthExceeded) as error:
        if error.param not in names:
            raise
        name = names[error.param]
        raise type(error)(str(error).replace(f"`{error.param}`", f"`{name}`"), param=name) from None
