"""What the server and the engine process say to each other: msgpack frames by msgspec over a local socket pair.

A frame is a 4-byte little-endian length and that many bytes of one tagged message. Nobody else can connect: the pair
is made by the server and one end is inherited by the child.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvarto.core.sampling import SamplingParams

MAX_FRAME_BYTES = 64 << 20
MAX_NAMES_IN_STATS = 256


class ResumedChoice(msgspec.Struct, frozen=True, array_like=True):
    """A choice that had begun when an engine died: the tokens that its client may already have."""

    index: int
    token_ids: tuple[int, ...]


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Queue a request. Answered by `TokensOut`s, each choice ending with a `finish_reason`, or by `Refused`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """With `seed` and `max_tokens` filled in by the client."""
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    priority: int = 0
    """Lower is earlier."""
    deadline_s: float | None = None
    """Seconds from arrival after which the request ends with finish reason `deadline`."""
    resumed: tuple[ResumedChoice, ...] | None = None
    """None: a new request. Otherwise only these choices run, each from where it was."""
    runs_alone: bool = False
    """Suspected of killing engines: its steps hold no other request."""
    adapter: str | None = None
    """Name of a registered adapter; None: the bare base."""
    adapter_digest: str | None = None
    """Of the content with which resumed choices began, in hex: they go on with no other."""
    is_taken: bool = False
    """It was taken before, by this engine or one before it, and waits for its adapter however long that is."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Forget a request, or one of its choices, whatever its state; unknown ones are ignored. Nothing is answered."""

    request_id: str
    choice: int | None = None
    """None: all of them."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Let a name mean the adapter at a path, which is opened and checked first. Answered by an `AdapterAnswer`.

    A name that has a meaning gets a new one; requests that came before finish on the old one.
    """

    request_id: str
    name: str
    path: str
    is_known: bool = False
    """An engine before this one had checked it: the name is there at once, the files are opened when it is wanted."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Let a name mean nothing; requests that came before finish. Answered by an `AdapterAnswer`."""

    request_id: str
    name: str


class ListAdapters(msgspec.Struct, frozen=True, kw_only=True, tag="list_adapters"):
    """Ask for all names. Answered by an `AdapterAnswer`."""

    request_id: str


class StatsRequest(msgspec.Struct, frozen=True, tag="stats_request"):
    """Ask for a `Stats`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process now; the server has drained before."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded and the first step ran. Sent once."""

    model_name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_concurrency: float
    """Sequences of `max_model_len` that the pages hold at once."""
    layout: str
    """The printed layout table."""
    phases: tuple[tuple[str, float], ...]
    """Named phases of loading, with seconds."""
    adapters: tuple[str, ...] = ()
    """Names that can be called from the start; `AdapterNames` tells of changes."""


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """Loading ended with an error that a person should read; the process exits."""

    error: str
    """Name of the class in `kvarto.core.errors`."""
    message: str


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """A phase of loading begins."""

    name: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the running phase of loading is; only long ones say so."""

    fraction: float
    """0 to 1."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token, and the likeliest at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokensOut(msgspec.Struct, frozen=True, kw_only=True, tag="tokens", omit_defaults=True):
    """New tokens of one choice."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of prompt tokens 1…, with the first output only, when asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; with the first output."""
    adapter_digest: str | None = None
    """Of the content of its adapter, in hex; with the first output."""
    finish_reason: str | None = None
    """`stop` (an end token), `length`, `deadline`, or `error` (non-finite logits, or steps that fail also alone)."""
    stop_token_id: int | None = None
    """The token that ended it, for `stop`."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A request that the engine will not run: an error of `kvarto.core.errors.RequestError`'s tree, by class name."""

    request_id: str
    error: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    """Of `Overloaded`."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One registered adapter."""

    name: str
    path: str
    parent: str
    """Name of the base model."""
    rank: int | None
    """The largest of its updates; None while its files were not opened, like the sizes."""
    size_bytes: int | None
    """As pages have them."""
    num_pages: int | None
    dtype: str | None = None
    """Of A and B in pages: `bf16`, `int8`, or `bf16+int8` where both are there."""
    tier: str
    """Nearest place of its bytes: `device`, `host`, `disk`, or `refused` when its files were not accepted."""
    digest: str | None
    """Of its content, in hex; None while it was not computed."""
    num_requests: int
    """Requests that use it, queued ones included."""
    warnings: tuple[str, ...] = ()


class AdapterAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="adapters"):
    """To a message about adapters: those that it was about, or an error by the name of its class."""

    request_id: str
    adapters: tuple[AdapterInfo, ...] = ()
    error: str | None = None
    message: str = ""


class AdapterNames(msgspec.Struct, frozen=True, tag="adapter_names"):
    """All registered names; sent whenever they change, unasked."""

    names: tuple[str, ...]


class StepOut(msgspec.Struct, frozen=True, kw_only=True, tag="step", omit_defaults=True):
    """All that one step yielded, in one frame. Also the heartbeat: an idle engine sends an empty one each second."""

    step: int
    """Steps completed since start."""
    going_on: tuple[str, ...] = ()
    """Requests of whose choice 0 there is one new token and nothing else to say: most of them, in most steps."""
    next_token_ids: tuple[int, ...] = ()
    """For each of `going_on` its token."""
    tokens: tuple[TokensOut, ...] = ()
    """All others, and what came after a token of `going_on`."""
    refused: tuple[Refused, ...] = ()
    running: tuple[str, ...] | None = None
    """Ids of the requests in the step that begins now; sent before it runs, so that a death has suspects."""

    def outputs(self) -> Iterator[TokensOut]:
        """All that is said of choices, in order."""
        for request_id, token_id in zip(self.going_on, self.next_token_ids, strict=True):
            yield TokensOut(request_id=request_id, choice=0, token_ids=(token_id,))
        yield from self.tokens


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges and counters since start, straight from ledger, pool and scheduler."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_held_pages: int = 0
    num_evictable_pages: int = 0
    num_draining_pages: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_guessed_tokens: int = 0
    num_right_guesses: int = 0
    num_adapters: int = 0
    """Registered names."""
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    num_adapter_hits: int = 0
    """Choices that found their adapter on the device."""
    num_adapter_failures: int = 0
    num_adapter_steps: int = 0
    """Steps with at least one adapter."""
    num_adapters_in_steps: int = 0
    """Distinct adapters of a step, added up over steps."""
    adapter_step_bytes: int = 0
    """Bytes of the distinct adapters of a step, added up over steps."""
    adapter_load_seconds: float = 0.0
    """Of all loads together, from the first wish to residency."""
    adapter_device_bytes: int = 0
    adapter_host_bytes: int = 0
    resident_adapters: tuple[str, ...] = ()
    """Names of adapters on the device, at most `MAX_NAMES_IN_STATS`."""
    running_adapters: tuple[str, ...] = ()
    """Names of adapters that run now, at most `MAX_NAMES_IN_STATS`."""
    waiting_adapters: tuple[str, ...] = ()
    """Names of adapters of requests that wait, at most `MAX_NAMES_IN_STATS`."""
    region_bytes: dict[str, int] = {}
    """By region and owner kind; adds up to the arena."""


ToEngine = AddRequest | Cancel | LoadAdapter | UnloadAdapter | ListAdapters | StatsRequest | Shutdown
FromEngine = Ready | LoadFailed | Phase | Progress | StepOut | AdapterAnswer | AdapterNames | Stats
