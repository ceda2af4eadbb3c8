"""POST /v1/completions: prompts as text or token ids, continued; with `echo` and log-probabilities as lm-eval needs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import Request
from starlette.responses import Response

from kvarto.engine.outputs import ChoiceOutput
from kvarto.server.answer import Answer, respond, submit
from kvarto.server.logprobs import CompletionLogprobsBuilder, joined, prompt_logprobs
from kvarto.server.prompts import truncated
from kvarto.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from kvarto.server.sampling import sampling_params
from kvarto.server.service import Service

DEFAULT_MAX_TOKENS = 16


class _Choice:
    """What must be remembered of one text between its parts."""

    def __init__(self, service: Service) -> None:
        self.has_begun = False
        self.logprobs = CompletionLogprobsBuilder(service.model.tokens)


class CompletionAnswer(Answer):
    """Texts that continue prompts."""

    id_prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(service, body, prompts)
        self._body = body
        self._prompts = prompts
        self._choices = [_Choice(service) for _ in range(len(prompts) * self.n)]

    @property
    def _only_echoes(self) -> bool:
        """`max_tokens` 0 with `echo` asks for the prompt alone; the one token that the engine draws is dropped."""
        return self._body.max_tokens == 0

    def count(self, output: ChoiceOutput) -> None:
        """Add an output to the usage."""
        super().count(output)
        if self._only_echoes:
            self._num_completion_tokens = 0

    def chunk(self, output: ChoiceOutput) -> Completion | None:
        """The new part of one text."""
        part = self._part(output)
        is_empty = not part.text and part.logprobs is None and part.finish_reason is None
        return None if is_empty else self._completion([part], self.running_usage)

    def text_chunk(self, index: int, text: str) -> Completion | None:
        """One that has only text."""
        if self._only_echoes or self._body.logprobs is not None:
            return None
        return self._completion([CompletionChoice(index=index, text=text)], self.running_usage)

    def usage_chunk(self) -> Completion:
        """Usage and no choices."""
        return self._completion([], self.usage())

    def whole(self, outputs: Sequence[ChoiceOutput]) -> Completion:
        """All texts, each joined from its parts."""
        parts: list[list[CompletionChoice]] = [[] for _ in self._choices]
        for output in outputs:
            part = self._part(output)
            parts[part.index].append(part)
        return self._completion([_joined(of_choice) for of_choice in parts], self.usage())

    def _completion(self, choices: list[CompletionChoice], usage: object) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)  # type: ignore[arg-type]

    def _part(self, output: ChoiceOutput) -> CompletionChoice:
        index = self.index_of(output)
        choice = self._choices[index]
        text, logprobs = "" if self._only_echoes else output.text, self._logprobs(choice, output)
        part = CompletionChoice(
            index=index, text=text, finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )
        if not choice.has_begun:
            choice.has_begun = True
            part.text = self._echo(output.prompt_index) + text
            if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                part.prompt_logprobs = prompt_logprobs(self.service.model.tokens, output.prompt_logprobs)
        part.logprobs = logprobs
        return part

    def _logprobs(self, choice: _Choice, output: ChoiceOutput) -> CompletionLogprobs | None:
        """Of the new tokens, after those of an echoed prompt in the first part."""
        if self._body.logprobs is None:
            return None
        parts = []
        if self._body.echo and not choice.has_begun and output.prompt_logprobs is not None:
            parts.append(choice.logprobs.prompt(self._prompts[output.prompt_index], output.prompt_logprobs))
        if not self._only_echoes:
            parts.append(choice.logprobs.output(output.token_ids, output.logprobs or ()))
        return joined(parts)

    def _echo(self, prompt_index: int) -> str:
        """The prompt's text, where it was asked for."""
        if not self._body.echo:
            return ""
        sent = self._body.prompt
        if self._body.truncate_prompt_tokens is None:
            if isinstance(sent, str):
                return sent
            if isinstance(sent[prompt_index], str):
                return str(sent[prompt_index])
        return self.service.model.tokenizer.decode(self._prompts[prompt_index], skip_special_tokens=False)


def _joined(parts: Sequence[CompletionChoice]) -> CompletionChoice:
    """The parts of one text as a whole."""
    last = parts[-1]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return CompletionChoice(
        index=last.index,
        text="".join(part.text for part in parts),
        logprobs=joined(logprobs) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=parts[0].prompt_logprobs,
    )


async def create_completion(service: Service, request: Request) -> Response:
    """Answer POST /v1/completions."""
    body = await service.bodies.read(request, CompletionRequest)
    service.adapter_of(body.model)
    add_special = body.add_special_tokens is not False
    limit = service.engine.ready.max_model_len
    encoded = await service.prompts.from_prompt(
        body.prompt,
        add_special_tokens=add_special,
        max_model_len=limit if body.truncate_prompt_tokens is None else None,
    )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = [truncated(prompt, body.truncate_prompt_tokens, limit, max_tokens) for prompt in encoded]
    if body.max_tokens is None:
        room = min((limit - len(prompt) for prompt in prompts), default=1)
        max_tokens = max(1, min(max_tokens, room))  # a default must not be what does not fit
    elif max_tokens == 0 and body.echo:
        max_tokens = 1
    sampling = sampling_params(body, service.model.sampling_defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
    generation = submit(service, prompts, sampling, body)
    answer = CompletionAnswer(service, body, prompts)
    return await respond(request, answer, generation, is_stream=body.stream)
