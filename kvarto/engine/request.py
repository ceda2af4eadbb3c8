"""Request and Choice: what the scheduler moves about. Tokens and states, no pages and no policy.

    AddRequest ──> Request ──> Choice 0 ─┬─ waiting ⇄ running ──> finished
                               Choice 1 ─┤     ⇅
                               …         │  parked: its adapter is not on the device
                                         └─ held: the leader computes the prompt, then the others fork from it

A choice is its prompt and the tokens drawn so far. That is all it needs to run from any state: new, preempted, forked
or resumed from an engine that died, it goes on from `prompt + output`, and batch invariance makes the rest equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from kvarto.core.sampling import SamplingParams
from kvarto.core.step import Float32, Int32
from kvarto.engine.lookup import Pause
from kvarto.engine.messages import AddRequest, TokenLogprobs
from kvarto.engine.penalties import SeenTokens, seen_tokens

if TYPE_CHECKING:
    from kvarto.adapters.registry import AdapterVersion
    from kvarto.adapters.resident import Resident
    from kvarto.cache.sequence import Sequence

Order = tuple[int, int, int]
"""(priority, arrival, choice): lower goes first."""


class Status(Enum):
    """Where a choice is."""

    HELD = "held"
    """Waits for its leader to compute the prompt; in no queue."""
    PARKED = "parked"
    """Waits for its adapter; in no queue."""
    WAITING = "waiting"
    RUNNING = "running"
    """Has a slot and, once it computed or forked something, a sequence in the cache."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """What its choices share."""

    request_id: str
    prompt: Int32
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    """Tokens that end a choice: the model's own, unless ignored, and the client's."""
    bias_ids: Int32
    bias_values: Float32
    banned_ids: Int32
    """Tokens that may not be drawn before `min_tokens`."""
    salt: str | None
    deadline: float | None
    """On the engine's clock."""
    runs_alone: bool
    adapter: AdapterVersion | None = None
    """None: the bare base."""
    adapter_digest: bytes | None = None
    """Of the content with which its choices began on an engine before this one; None: any will do."""
    is_taken: bool = False
    """It is not refused for want of room: it was taken before."""
    adapter_start: int | None = 0
    """Position from which the adapter is active; None: nowhere, for what would call it is not in the prompt. Known
    once its headers were read.
    """
    choices: list[Choice] = field(default_factory=list)
    held: list[Choice] = field(default_factory=list)
    """Choices without tokens that wait for the leader; ascending."""
    num_unfinished: int = 0
    was_admitted: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens that the first admission found in the prefix cache."""
    collector: Choice | None = None
    """The choice that computes `prompt_logprobs`; None when none are asked for, or they are complete."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)


@dataclass(slots=True, eq=False)
class Choice:
    """One continuation of a prompt."""

    request: Request
    index: int
    order: Order
    output: list[int]
    """Tokens drawn so far."""
    num_tokens: int
    """Prompt and output: tokens that must be in pages before the next can be drawn."""
    status: Status = Status.HELD
    slot: int = 0
    """Row of the sampling and page tables; meaningful while running."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in pages; meaningful while running."""
    sequence: Sequence | None = None
    resident: Resident | None = None
    """Its adapter on the device, held by this choice: while it runs, and as far as pages allow while it waits."""
    seen: SeenTokens | None = None
    """For penalties; None where none are used, and before the first admission."""
    ticket: int = 0
    """Of its valid entry in the waiting queue."""
    num_failures: int = 0
    """Steps in a row that failed with it on board."""
    num_misses: int = 0
    """Times in a row that it found no page although nothing else could give one."""
    num_preemptions: int = 0
    distrusts_cache: bool = False
    """A copy for it failed: start from no copied page the next time."""
    has_reported: bool = False
    """Its first output was sent."""
    pause: Pause = field(default_factory=Pause)
    """Between guesses of its next tokens."""

    @property
    def is_decoding(self) -> bool:
        """One token is missing, and it is one that was drawn."""
        return self.num_tokens - self.num_computed_tokens == 1 and self.num_tokens > self.request.num_prompt_tokens

    @property
    def known_tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt.tolist(), *self.output]

    def tokens(self, start: int, stop: int) -> Int32:
        """Prompt and output at positions `[start, stop)`."""
        num_prompt = len(self.request.prompt)
        if stop <= num_prompt:
            return self.request.prompt[start:stop]
        drawn = np.array(self.output[max(0, start - num_prompt) : stop - num_prompt], dtype=np.int32)
        return drawn if start >= num_prompt else np.concatenate([self.request.prompt[start:], drawn])

    def prepare(self) -> None:
        """Count the tokens that penalties look at, once; needed before the first row is drawn."""
        if self.seen is None:
            self.seen = seen_tokens(self.request.sampling, self.request.prompt, self.output)

    def append(self, token_id: int) -> None:
        """A token was drawn."""
        self.output.append(token_id)
        self.num_tokens += 1
        if self.seen is not None:
            self.seen.add(token_id)


def is_adapted(choice: Choice) -> bool:
    """Its adapter changes what it computes somewhere."""
    return choice.resident is not None and choice.request.adapter_start is not None


def sequence_of(choice: Choice) -> Sequence:
    """The sequence of a choice that runs."""
    assert choice.sequence is not None, f"choice {choice.order} runs without a sequence"
    return choice.sequence


def make_request(
    message: AddRequest,
    *,
    priority: int,
    arrival: int,
    max_tokens: int,
    vocab_size: int,
    now: float,
    adapter: AdapterVersion | None = None,
) -> Request:
    """A request and its choices, all held. The message is valid; `arrival` numbers requests."""
    sampling = message.sampling
    own_ends = {token for token in message.eos_token_ids if 0 <= token < vocab_size}
    request = Request(
        request_id=message.request_id,
        prompt=np.array(message.prompt_token_ids, dtype=np.int32),
        sampling=sampling,
        max_tokens=max_tokens,
        stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(own_ends)),
        bias_ids=np.array(list(sampling.logit_bias), dtype=np.int32),
        bias_values=np.array(list(sampling.logit_bias.values()), dtype=np.float32),
        banned_ids=np.array(sorted(own_ends | set(sampling.stop_token_ids)), dtype=np.int32),
        salt=message.cache_salt,
        deadline=None if message.deadline_s is None else now + message.deadline_s,
        runs_alone=message.runs_alone,
        adapter=adapter,
        adapter_digest=None if message.adapter_digest is None else bytes.fromhex(message.adapter_digest),
        is_taken=message.is_taken,
    )
    if message.resumed is None:
        begun: list[tuple[int, tuple[int, ...]]] = [(index, ()) for index in range(sampling.n)]
    else:
        begun = sorted((choice.index, choice.token_ids) for choice in message.resumed)
    for index, token_ids in begun:
        num_tokens = request.num_prompt_tokens + len(token_ids)
        order = (priority, arrival, index)
        request.choices.append(Choice(request, index, order, list(token_ids), num_tokens))
    request.num_unfinished = len(request.choices)
    if sampling.prompt_logprobs is not None and len(begun) == sampling.n and not any(ids for _, ids in begun):
        request.collector = request.choices[0]
    return request
