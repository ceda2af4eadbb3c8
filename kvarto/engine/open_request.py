"""The client's memory of one prompt that is being served: enough to start it, to follow it and to resume it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvarto.core.sampling import SamplingParams
from kvarto.engine.generation import Generation
from kvarto.engine.messages import AddRequest
from kvarto.engine.outputs import RequestOutputs


@dataclass(slots=True)
class RequestTimes:
    """Moments on the monotonic clock, in seconds; None for what has not happened."""

    submitted_s: float
    scheduled_s: float | None = None
    """First time in a step."""
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True)
class OpenRequest:
    """One prompt, from submission to its end. `attempt` counts how often an engine was given it."""

    first: AddRequest
    """As it was submitted."""
    generation: Generation
    outputs: RequestOutputs
    times: RequestTimes
    attempt: int = 0
    num_cached_tokens: int = 0
    adapter_digest: str | None = None
    """Of the adapter's content, once something came of it."""

    @property
    def request_id(self) -> str:
        """Made by the client; the same for every attempt."""
        return self.first.request_id

    @property
    def engine_id(self) -> str:
        """Its id in frames. Changes with each attempt, so that late frames of an earlier one hit nobody."""
        return f"{self.first.request_id}.{self.attempt}"

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its token ids."""
        return self.first.prompt_token_ids

    @property
    def sampling(self) -> SamplingParams:
        """With `seed` and `max_tokens` filled in."""
        return self.first.sampling

    def message(self, now_s: float, *, runs_alone: bool) -> AddRequest:
        """What an engine must be told, whether the request is new or had begun."""
        sampling, deadline_s = self.sampling, self.first.deadline_s
        if self.outputs.has_begun and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # its client has them
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (now_s - self.times.submitted_s))
        return msgspec.structs.replace(
            self.first,
            request_id=self.engine_id,
            sampling=sampling,
            deadline_s=deadline_s,
            resumed=self.outputs.resumed(),
            adapter_digest=self.adapter_digest,
            runs_alone=runs_alone,
            is_taken=self.attempt > 0,
        )


class Observer(Protocol):
    """Is told what happens to requests, for metrics. Times are in seconds."""

    def tokens_arrived(self, request: OpenRequest, num_tokens: int, interval_s: float | None) -> None:
        """New tokens of one choice; `interval_s` since the request's tokens before, None for its first."""

    def request_ended(self, request: OpenRequest, reason: str, now_s: float) -> None:
        """`reason` is the last finish reason, `abort` or `error`."""

    def request_refused(self, code: str) -> None:
        """One was not taken for want of room; `code` is that of its error."""

    def engine_restarted(self) -> None:
        """A fresh engine took over."""
