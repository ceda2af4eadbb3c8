"""Settings of one engine. The command line is built from this class: a field is a flag, its docstring is the help."""

from __future__ import annotations

import secrets

import msgspec

from kvarto.core.digest_fields import PAGE_KEY_BYTES


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Faults to inject, for tests of a real engine process. Empty in production."""

    abort_on_tokens: tuple[int, ...] = ()
    """Abort the process (SIGABRT) in any step in which a prompt that begins with these tokens is computed."""


class EngineSecret(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines of one server know, one after the other, and nobody else. Empty: an engine draws its own."""

    page_key: bytes = b""
    """Under which pages of adapters are hashed: a choice is resumed by the next engine if its adapter's digest is what
    it was."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvarto serve` and `kvarto.LLM` ask of an engine. Sizes are bytes; None means `auto`."""

    model: str
    """Folder, GGUF file, hub id (`org/name`, `org/name:Q4_K_M`), or `demo`."""  # an engine process gets a local path
    device: str = "cpu"
    """Where weights and pages live: `cpu`, or a PyTorch device such as `cuda:0`."""
    backend: str = "auto"
    """What computes: `native` (this machine's cores), `reference` (PyTorch), or `auto`: native on a CPU."""
    threads: int | None = None
    """Threads that compute; without it, as many as the cores that this process may use."""
    device_memory: int | None = None
    """Bytes for weights, activations and pages together."""
    gpu_memory_utilization: float | None = None
    """The same as a share (0 to 1] of what this process may use: the smaller of its cgroup limit and the device."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for pages alone."""
    block_size: int = 16
    """Tokens per page: 8 to 256, a power of two. Output does not depend on it."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; without it, the model's own limit."""
    max_num_seqs: int = 32
    """Sequences that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens of one step; longer prompts go in chunks."""
    max_num_queued: int = 1024
    """Requests that wait; more are answered 429."""
    dtype: str = "auto"
    """Weights in memory: `auto` (as the model's files have them; f32 on the reference backend), `f32`, `f16` or `bf16`.
    Products add up in f32."""
    activations: str = "auto"
    """What weights are multiplied with: `f32`, `int8` (quantised per row and 32 columns, where weights have 8 bits or
    less), `bf16` (such weights too, on a machine with AMX), or `auto`: bf16 where that can be, else int8. With f32
    the tokens are those of the reference backend."""
    kv_cache_dtype: str = "auto"
    """KV in pages: `auto` (f32 with f32 activations, else f16 or bf16), `f32`, `f16`, `bf16` or `int8`."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prefixes."""
    prompt_lookup_num_tokens: int = 0
    """Tokens to guess per step from what followed the same words before; verified, so the output stays the same."""
    scheduling_policy: str = "fcfs"
    """`fcfs`, or `priority` (a request's `priority`: lower is earlier)."""
    adapter_dir: tuple[str, ...] = ()
    """Folders whose sub-folders and GGUF files are LoRA adapters, served by name as a `model`. Watched for changes."""
    lora_modules: tuple[str, ...] = ()
    """Single LoRA adapters, each as `name=path`."""
    max_lora_rank: int = 0
    """Largest rank of an adapter. 0: 64 where adapters are named, else none can be loaded."""
    adapter_dtype: str = "auto"
    """Adapters in memory: `auto` (as their files have them), or codes with a scale per 32 columns, `int8` or `int4`:
    0.53 or 0.28 of bf16's bytes on the device and in host memory."""
    adapter_host_memory: int = 0
    """Bytes of host memory that keep adapters which left the device; 0 reads them again from disk."""
    adapter_floor_memory: int = 0
    """Bytes of pages with adapters that KV does not push out; whole adapters only."""
    kv_floor_memory: int = 0
    """Bytes of pages with KV that adapters do not push out."""
    max_adapters_per_step: int = 0
    """Distinct adapters that run at once, each of which is read in every step; 0: as many as there are sequences."""
    adapter_affinity: bool = True
    """Admit requests of adapters that run already before others, within bounds: a step reads each adapter once."""
    max_requests_per_adapter: int = 0
    """Requests of one adapter that run and wait; more are answered 429. 0: as many as there is room for."""
    max_adapter_wait_s: float = 60.0
    """Seconds until it is the turn of a request's adapter to come to the device, by the pace at which adapters come; a
    request that would have to wait longer is answered 429 at once. 0: any time."""
    prefault: bool = False
    """Touch every page before serving instead of in the background."""
    seed: int | None = None
    """Seeds the seeds of requests that bring none; without it they come from the system."""
    secret: EngineSecret = EngineSecret()
    """Drawn by the server: `with_secret`."""
    faults: FaultPlan = FaultPlan()
    """Only for tests."""


def with_secret(config: EngineConfig) -> EngineConfig:
    """The same, to start any number of engines that go on with each other's requests."""
    if config.secret.page_key:
        return config
    return msgspec.structs.replace(config, secret=EngineSecret(page_key=secrets.token_bytes(PAGE_KEY_BYTES)))
