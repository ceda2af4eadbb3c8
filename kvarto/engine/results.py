"""Results: from what a step drew to what clients hear. Order of work per chunk: commit, fork, append, end or go on.

A row whose logits are not finite ends its own choice with `error` and nothing of that chunk is committed, so that bad
KV is neither read again nor cached; all other rows count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvarto.core.step import StepResult
from kvarto.engine.chunk import Chunk
from kvarto.engine.messages import TokenLogprobs, TokensOut
from kvarto.engine.request import Choice
from kvarto.engine.scheduler import Scheduler


@dataclass(slots=True)
class Outputs:
    """What clients are to hear; the fields are those of `StepOut`."""

    going_on: list[str] = field(default_factory=list)
    next_token_ids: list[int] = field(default_factory=list)
    tokens: list[TokensOut] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.going_on or self.tokens)

    @property
    def num_tokens(self) -> int:
        """New tokens of all choices."""
        return len(self.next_token_ids) + sum(len(output.token_ids) for output in self.tokens)

    def extend(self, later: Outputs) -> None:
        """Append what came later."""
        self.going_on += later.going_on
        self.next_token_ids += later.next_token_ids
        self.tokens += later.tokens


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Columns of a StepResult as Python lists: one conversion per step instead of one per value."""

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    is_finite: list[bool]

    @classmethod
    def of(cls, result: StepResult) -> _Drawn:
        return cls(
            result.token_ids.tolist(),
            result.logprobs.tolist(),
            result.top_ids.tolist() if result.top_ids.size else [],
            result.top_logprobs.tolist() if result.top_ids.size else [],
            result.is_finite.tolist(),
        )

    def logprobs_of(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        top = zip(self.top_ids[row][:num_top], self.top_logprobs[row][:num_top], strict=True) if num_top else ()
        return TokenLogprobs(token_id, self.logprobs[row], tuple(top))


def collect(chunks: list[Chunk], result: StepResult, scheduler: Scheduler) -> Outputs:
    """Apply a step to its choices. Rows of `result` are in the order in which the batch asked for them."""
    drawn = _Drawn.of(result)
    collected = Outputs()
    outputs = collected.tokens
    all_finite = all(drawn.is_finite)
    row = 0
    for chunk in chunks:
        if all_finite and chunk.is_decode:
            scheduler.settle(chunk)
            _collect_draw(chunk.choice, drawn, row, scheduler, collected)
            row += 1
            continue
        num_draws = chunk.num_drawn_rows
        end = row + chunk.num_prompt_rows + num_draws
        if chunk.guess and drawn.is_finite[row]:
            outputs.append(_collect_guess(chunk, drawn, row, scheduler))
        elif not chunk.guess and all(drawn.is_finite[row:end]):
            scheduler.settle(chunk)
            _collect_prompt_rows(chunk, drawn, row)
            if chunk.draws:
                _collect_draws(chunk, drawn, end - num_draws, scheduler, outputs)
        else:
            outputs += [end_choice(choice, "error", scheduler) for choice in (chunk.choice, *chunk.forks)]
        row = end
    return collected


def end_choice(choice: Choice, reason: str, scheduler: Scheduler) -> TokensOut:
    """End a choice without a new token, in any state."""
    scheduler.finish(choice)
    return TokensOut(request_id=choice.request.request_id, choice=choice.index, token_ids=(), finish_reason=reason)


def ends_before_running(choice: Choice) -> TokensOut | None:
    """What a resumed choice hears whose tokens show that it is over; None when it goes on. Does not end it."""
    reason = _finish_reason(choice) if choice.output else None
    if reason is None:
        return None
    return TokensOut(
        request_id=choice.request.request_id,
        choice=choice.index,
        token_ids=(),
        finish_reason=reason,
        stop_token_id=choice.output[-1] if reason == "stop" else None,
    )


def _collect_prompt_rows(chunk: Chunk, drawn: _Drawn, first_row: int) -> None:
    request = chunk.choice.request
    num_top = request.sampling.prompt_logprobs or 0
    for row in range(chunk.num_prompt_rows):
        token_id = int(request.prompt[chunk.start + 1 + row])
        request.prompt_logprobs.append(drawn.logprobs_of(first_row + row, token_id, num_top))


def _collect_draw(choice: Choice, drawn: _Drawn, row: int, scheduler: Scheduler, collected: Outputs) -> None:
    """The common case: one choice, one token, no prompt behind it."""
    token_id = drawn.token_ids[row]
    choice.append(token_id)
    reason = _finish_reason(choice)
    if reason is None and choice.has_reported and choice.index == 0 and choice.request.sampling.logprobs is None:
        collected.going_on.append(choice.request.request_id)
        collected.next_token_ids.append(token_id)
        return
    collected.tokens.append(_output(choice, drawn, row))
    if reason is not None:
        scheduler.finish(choice)


def _collect_guess(chunk: Chunk, drawn: _Drawn, first_row: int, scheduler: Scheduler) -> TokensOut:
    """Rows count up to the first whose guess proves wrong: it drew what comes instead."""
    choice = chunk.choice
    outputs = []
    for row, guess in enumerate((*chunk.guess, None), first_row):
        if not drawn.is_finite[row]:
            break  # the next step meets this row again, and ends the choice
        choice.append(drawn.token_ids[row])
        outputs.append(_output(choice, drawn, row))
        if outputs[-1].finish_reason is not None or drawn.token_ids[row] != guess:
            break
    scheduler.settle(chunk, num_right=len(outputs) - 1)
    if outputs[-1].finish_reason is not None:
        scheduler.finish(choice)
    return msgspec.structs.replace(
        outputs[-1],
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=None if outputs[-1].logprobs is None else tuple(each for o in outputs for each in o.logprobs or ()),
    )


def _collect_draws(chunk: Chunk, drawn: _Drawn, first_row: int, scheduler: Scheduler, outputs: list[TokensOut]) -> None:
    leader = chunk.choice
    was_first = not leader.output
    leader.append(drawn.token_ids[first_row])
    outputs.append(_output(leader, drawn, first_row))
    if leader.request.collector is leader:
        leader.request.collector = None
    for row, fork in enumerate(chunk.forks, first_row + 1):
        fork.append(drawn.token_ids[row])
        outputs.append(_output(fork, drawn, row))
        if _finish_reason(fork) is None:
            scheduler.start_fork(leader, fork)
        else:
            scheduler.finish(fork)
    if _finish_reason(leader) is not None:  # after the forks, which share its pages
        scheduler.finish(leader)
    if was_first and leader.request.num_unfinished:
        scheduler.release_held(leader.request)


def _output(choice: Choice, drawn: _Drawn, row: int) -> TokensOut:
    """The newest token of a choice; the first output also says what is known of the prompt."""
    request, sampling = choice.request, choice.request.sampling
    token_id = choice.output[-1]
    reason = _finish_reason(choice)
    if choice.has_reported and reason is None and sampling.logprobs is None:
        return TokensOut(request_id=request.request_id, choice=choice.index, token_ids=(token_id,))
    output = TokensOut(
        request_id=request.request_id,
        choice=choice.index,
        token_ids=(token_id,),
        logprobs=None if sampling.logprobs is None else (drawn.logprobs_of(row, token_id, sampling.logprobs),),
        prompt_logprobs=tuple(request.prompt_logprobs) if request.collector is choice else None,
        num_cached_tokens=0 if choice.has_reported else request.num_cached_tokens,
        adapter_digest=None if choice.has_reported or choice.resident is None else choice.resident.digest.hex(),
        finish_reason=reason,
        stop_token_id=token_id if reason == "stop" else None,
    )
    choice.has_reported = True
    return output


def _finish_reason(choice: Choice) -> str | None:
    """Whether the last token ended the choice."""
    request = choice.request
    num_output = len(choice.output)
    if choice.output[-1] in request.stop_ids and num_output >= request.sampling.min_tokens:
        return "stop"
    return "length" if num_output >= request.max_tokens else None
