"""From EngineConfig to what is planned for: data types, step limits, budget, layout. Refuses what cannot work.

Nothing is allocated here.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.errors import UsageError
from kvarto.core.layout import Budget, Layout
from kvarto.core.program import Program
from kvarto.core.units import MIB, align_up
from kvarto.engine.adapter_settings import check_adapter_settings, max_lora_rank
from kvarto.engine.config import EngineConfig
from kvarto.memory.budget import resolve_budget
from kvarto.memory.limits import ProcessLimits, device_limits, read_limits
from kvarto.ops.base import Backend
from kvarto.planning.plan import default_device_bytes, plan

PROMPT_LOGPROB_ROWS = 32
"""Rows of a step beside one per sequence, for log-probabilities of prompts, which are computed that many at a time."""
FLOAT_DTYPES = (DType.F32, DType.F16, DType.BF16)
KV_DTYPES = (*FLOAT_DTYPES, DType.I8)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
POLICIES = ("fcfs", "priority")
BACKENDS = ("auto", "native", "reference")
ACTIVATIONS = ("auto", "f32", "bf16", "int8")


def check_settings(config: EngineConfig) -> None:
    """Refuse what no model could be served with, before one is looked for or fetched. Raises UsageError."""
    if config.threads is not None:
        _at_least("--threads", config.threads, 1)
    if config.max_model_len is not None:
        _at_least("--max-model-len", config.max_model_len, 2)
    _at_least("--max-num-seqs", config.max_num_seqs, 1)
    _at_least("--prompt-lookup-num-tokens", config.prompt_lookup_num_tokens, 0)
    _at_least("--max-num-queued", config.max_num_queued, 1)
    _at_least("--max-num-batched-tokens", config.max_num_batched_tokens, 1)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise UsageError(
            f"`--max-num-batched-tokens {config.max_num_batched_tokens}` is less than `--max-num-seqs "
            f"{config.max_num_seqs}`; each running sequence needs a token per step, so raise the first or lower the "
            "second"
        )
    _one_of("--block-size", config.block_size, BLOCK_SIZES)
    _one_of("--scheduling-policy", config.scheduling_policy, POLICIES)
    _one_of("--backend", config.backend, BACKENDS)
    _one_of("--activations", config.activations, ACTIVATIONS)
    _one_of("--dtype", config.dtype, ("auto", *FLOAT_DTYPES))
    _one_of("--kv-cache-dtype", config.kv_cache_dtype, ("auto", *KV_DTYPES))
    check_adapter_settings(config)


def open_backend(config: EngineConfig) -> Backend:
    """The backend for `config.backend` and `config.device`, without memory yet. Raises UsageError."""
    num_threads = config.threads or read_limits().num_cpus
    if config.backend == "reference" or (config.backend == "auto" and config.device != "cpu"):
        return _open_reference(config, num_threads)
    if config.device != "cpu":
        raise UsageError(f"`--backend native` computes on `cpu`, not on `{config.device}`; use `--backend reference`")
    return _open_native(config, num_threads)


def _open_native(config: EngineConfig, num_threads: int) -> Backend:
    try:
        from kvarto.ops.native import NativeBackend
    except ImportError as error:
        raise UsageError(f"the native module is not built here ({error}); `make native` builds it") from error
    return NativeBackend(num_threads, activations=config.activations, dtype=config.dtype)


def _open_reference(config: EngineConfig, num_threads: int) -> Backend:
    if config.activations in ("bf16", "int8"):
        asked = f"`--activations {config.activations}`"
        raise UsageError(f"{asked} needs the native backend; the reference computes in f32")
    try:
        from kvarto.ops.reference.backend import ReferenceBackend
    except ImportError as error:
        raise UsageError(f"the reference backend needs PyTorch ({error}); `pip install 'kvarto[torch]'`") from error
    return ReferenceBackend(config.device, num_threads)


def row_major_dtype(config: EngineConfig, backend: Backend) -> DType:
    """How matrices are kept that the backend does not pack. One that packs reads what is left as f32."""
    is_packing = backend.weight_format("F32") is not None
    return DType.F32 if is_packing or config.dtype == "auto" else DType(config.dtype)


def kv_dtype(config: EngineConfig, program: Program, backend: Backend) -> DType:
    """How KV is kept in pages."""
    return backend.default_kv_dtype(program) if config.kv_cache_dtype == "auto" else DType(config.kv_cache_dtype)


def step_limits(config: EngineConfig, program: Program) -> StepLimits:
    """The largest step. Raises UsageError for a context that the model was not made for."""
    return StepLimits(
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_samples=config.max_num_seqs + PROMPT_LOGPROB_ROWS,
        max_context=_max_context(config, program),
        max_lora_rank=max_lora_rank(config),
    )


def plan_layout(config: EngineConfig, program: Program, backend: Backend) -> Layout:
    """Where every byte would go. Raises UsageError or BudgetTooSmall."""
    limits, dtype, scratch_bytes = _plan_inputs(config, program, backend)
    process = _memory_limits(config.device, backend)
    budget = resolve_budget(
        process,
        default_device_bytes(program, limits, dtype, config.block_size, scratch_bytes),
        device_memory=config.device_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
    )
    usable_bytes = process.arena_bytes
    return plan(program, budget, limits, dtype, config.block_size, scratch_bytes, usable_bytes=usable_bytes)


def plan_for_load(config: EngineConfig, program: Program, backend: Backend, tokens_per_seq: int) -> Layout:
    """What a server needs to hold `max_num_seqs` sequences of so many tokens at once, wherever it will run.

    The budget is whole MiB. Raises UsageError.
    """
    limits, dtype, scratch_bytes = _plan_inputs(config, program, backend)
    needed_bytes = default_device_bytes(program, limits, dtype, config.block_size, scratch_bytes, tokens_per_seq)
    budget = Budget(align_up(needed_bytes, MIB), f"{limits.max_seqs:,} sequences of {tokens_per_seq:,} tokens")
    return plan(program, budget, limits, dtype, config.block_size, scratch_bytes)


def _plan_inputs(config: EngineConfig, program: Program, backend: Backend) -> tuple[StepLimits, DType, dict[int, int]]:
    """Step limits, type of KV, and scratch by op index."""
    limits, dtype = step_limits(config, program), kv_dtype(config, program, backend)
    kv_format = program.kv_format(dtype, config.block_size)
    sizes = {index: backend.scratch_bytes(op, program, limits, kv_format) for index, op in enumerate(program.ops)}
    return limits, dtype, {index: size for index, size in sizes.items() if size}


def _memory_limits(device: str, backend: Backend) -> ProcessLimits:
    """Of the memory that holds the arena: the device's own, or this process's share of the machine."""
    host, own = read_limits(), backend.device_memory()
    if own is None:
        return host
    total_bytes, free_bytes = own
    _, _, index = device.partition(":")
    return device_limits(total_bytes, free_bytes, host.num_cpus, device_index=int(index or 0))


def _max_context(config: EngineConfig, program: Program) -> int:
    if config.max_model_len is None:
        return program.max_positions
    if config.max_model_len > program.max_positions:
        raise UsageError(
            f"`--max-model-len {config.max_model_len}` is beyond the {program.max_positions} positions that the model "
            "was made for; give at most that"
        )
    return config.max_model_len


def _one_of(flag: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise UsageError(f"`{flag} {value}` is not one of {', '.join(map(str, choices))}")


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"`{flag} {value}` is too small; give {least} or more")
