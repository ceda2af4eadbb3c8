"""LLM: a model in this process, for scripts. One engine, no server, no child; a list of prompts is one batch of work.

with kvarto.LLM("demo") as llm:
    for output in llm.generate(["Once upon a time", "The sea"], kvarto.SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from kvarto.core.dtype import DType
from kvarto.core.errors import InvalidRequest
from kvarto.core.sampling import SamplingParams
from kvarto.engine.assemble import build
from kvarto.engine.carried_errors import error_of
from kvarto.engine.channel import LocalChannel
from kvarto.engine.config import EngineConfig
from kvarto.engine.engine import Engine
from kvarto.engine.messages import AddRequest, Cancel, StepOut, TokenLogprobs
from kvarto.engine.outputs import ChoiceOutput, RequestOutputs
from kvarto.engine.settings import check_settings
from kvarto.engine.token_table import TokenTable
from kvarto.engine.validate import resolve_max_tokens, validate_request
from kvarto.models.hub import resolve
from kvarto.models.model import Model, open_model

Prompt = str | Sequence[int]


@dataclass(slots=True)
class CompletionOutput:
    """One choice of one prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """An end token included."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, when asked for."""
    finish_reason: str | None = None
    """`stop`, `length`, or `error` when the model's numbers were not finite or its steps failed."""
    stop_reason: str | int | None = None
    """The stop string or the stop token; None for the model's own end."""


@dataclass(slots=True)
class RequestOutput:
    """What came of one prompt."""

    prompt: str | None
    """As it was given; None when it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` of them."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of prompt tokens 1…, when asked for."""


class LLM:
    """A model, loaded. Close it, or use it in a `with` statement."""

    def __init__(self, model: str, **settings: Any) -> None:
        """`settings` are the fields of EngineConfig. Raises KvartoError when the model or the budget cannot work."""
        config = msgspec.structs.replace(EngineConfig(model=model), **settings)
        check_settings(config)
        path = resolve(model)
        config = msgspec.structs.replace(config, model=str(path))
        self._model: Model = open_model(path, DType.F32)  # for its texts; the engine loads its own weights
        self._model.files.close()
        self._tokens = TokenTable(self._model.tokenizer)
        self._channel = LocalChannel()
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._max_open = config.max_num_seqs * 2  # enough that a place that becomes free is taken at once
        # The queue bounds what clients send; here there are none, and what waits is handed over bit by bit.
        config = msgspec.structs.replace(
            config, max_num_queued=max(config.max_num_queued, self._max_open), max_adapter_wait_s=0.0
        )
        self._num_requests = 0
        try:
            self._engine: Engine = build(config, self._channel)
        except BaseException:
            self._model.close()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, given as text or token ids; one answer per prompt, in order.

        `sampling_params` are for all prompts, or one for each; None takes the model's own defaults. So is `adapter`,
        a name from `adapter_dir` or `lora_modules`; None is the bare base. All are checked before anything runs.
        Raises RequestError.
        """
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._run(listed, self._sampling_for(listed, sampling_params), _for_each(adapter, len(listed)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, in the model's chat template; see `generate` for `adapter`.

        Raises RequestError.
        """
        if self._model.chat_template is None:
            raise InvalidRequest(f"the model `{self._model.name}` has no chat template; use `generate`")
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        texts = [self._model.chat_template.render(each, **template_variables) for each in conversations]
        prompts = [self._model.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        names = _for_each(adapter, len(prompts))
        outputs = self._run(prompts, self._sampling_for(prompts, sampling_params), names)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close()
        self._model.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- one call -----------------------------------------------------------------------------------------------

    def _sampling_for(
        self, prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = SamplingParams(**self._model.generation_defaults)  # type: ignore[arg-type]
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise InvalidRequest(
                f"{len(given)} `sampling_params` for {len(prompts)} prompts; give one, or one for each"
            )
        return list(given)

    def _run(
        self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], adapters: Sequence[str | None]
    ) -> list[RequestOutput]:
        messages = [self._message(*each) for each in zip(prompts, sampling, adapters, strict=True)]
        results = [
            RequestOutput(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=list(message.prompt_token_ids),
                outputs=[CompletionOutput(index) for index in range(message.sampling.n)],
            )
            for prompt, message in zip(prompts, messages, strict=True)
        ]
        batch = _Batch(self._channel, self._tokens, messages, results)
        try:
            while batch.feed(self._max_open):
                self._engine.loop.step()
                batch.take()
        finally:
            batch.cancel()
            while self._engine.loop.has_work or self._channel.inbox:
                self._engine.loop.step()
            self._channel.outbox.clear()
        return results

    def _message(self, prompt: Prompt, sampling: SamplingParams, adapter: str | None) -> AddRequest:
        ids = self._model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        self._num_requests += 1
        message = AddRequest(
            request_id=f"llm-{self._num_requests}",
            prompt_token_ids=tuple(ids),
            sampling=msgspec.structs.replace(
                sampling, seed=seed, max_tokens=resolve_max_tokens(sampling, len(ids), self._engine.limits)
            ),
            eos_token_ids=self._model.eos_token_ids,
            adapter=adapter,
        )
        validate_request(message, self._engine.limits)
        return message


def _for_each(adapter: str | Sequence[str | None] | None, num_prompts: int) -> list[str | None]:
    if adapter is None or isinstance(adapter, str):
        return [adapter] * num_prompts
    if len(adapter) != num_prompts:
        raise InvalidRequest(f"{len(adapter)} adapters for {num_prompts} prompts; give one, or one for each")
    return list(adapter)


class _Batch:
    """The prompts of one call on their way through the engine, a bounded number of them at a time."""

    def __init__(
        self,
        channel: LocalChannel,
        tokens: TokenTable,
        messages: Sequence[AddRequest],
        results: Sequence[RequestOutput],
    ) -> None:
        self._channel = channel
        self._tokens = tokens
        self._waiting = list(zip(messages, results, strict=True))[::-1]
        self._open: dict[str, tuple[RequestOutputs, RequestOutput]] = {}

    def feed(self, max_open: int) -> bool:
        """Hand over waiting prompts while fewer than `max_open` are open. False when all have ended."""
        while self._waiting and len(self._open) < max_open:
            message, result = self._waiting.pop()
            outputs = RequestOutputs(message.sampling, self._tokens, eos_token_ids=message.eos_token_ids)
            self._open[message.request_id] = outputs, result
            self._channel.inbox.append(message)
        return bool(self._open)

    def take(self) -> None:
        """Sort what the engine said into the results. Raises the RequestError of a refused prompt."""
        while self._channel.outbox:
            step = self._channel.outbox.popleft()
            if not isinstance(step, StepOut):
                continue
            for refused in step.refused:
                if refused.request_id in self._open:
                    raise error_of(refused)
            for tokens in step.outputs():
                outputs, result = self._open.get(tokens.request_id, (None, None))
                if outputs is None or result is None or (output := outputs.feed(tokens)) is None:
                    continue
                _add(result, output)
                if outputs.is_finished:
                    self._end(tokens.request_id)
                elif output.finish_reason is not None and tokens.finish_reason is None:  # a stop string
                    self._channel.inbox.append(Cancel(tokens.request_id, tokens.choice))

    def cancel(self) -> None:
        """Forget what still runs."""
        self._waiting.clear()
        for request_id in list(self._open):
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        """A choice that a stop string ended goes on in the engine until it is told."""
        del self._open[request_id]
        self._channel.inbox.append(Cancel(request_id))


def _add(result: RequestOutput, output: ChoiceOutput) -> None:
    choice = result.outputs[output.choice]
    choice.text += output.text
    choice.token_ids.extend(output.token_ids)
    if output.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or ()), *output.logprobs]
    choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
    if output.num_cached_tokens is not None:
        result.num_cached_tokens = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        result.prompt_logprobs = list(output.prompt_logprobs)
