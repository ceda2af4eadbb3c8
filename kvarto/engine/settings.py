"""From EngineConfig to what is planned for: data types, step limits, budget, layout. Refuses what cannot work.

Nothing is allocated here.
"""

from __future__ import annotations

from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.errors import UsageError
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.engine.config import EngineConfig
from kvarto.memory.budget import resolve_budget
from kvarto.memory.limits import ProcessLimits, read_limits
from kvarto.ops.base import Backend
from kvarto.planning.plan import default_device_bytes, plan

PROMPT_LOGPROB_ROWS = 32
"""Rows of a step beside one per sequence, for log-probabilities of prompts, which are computed that many at a time."""
FLOAT_DTYPES = (DType.F32, DType.F16, DType.BF16)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
POLICIES = ("fcfs", "priority")


def open_backend(config: EngineConfig) -> Backend:
    """The backend for `config.device`, without memory yet. Raises UsageError when PyTorch or the device is missing."""
    if config.threads is not None and config.threads < 1:
        raise UsageError(f"`--threads {config.threads}` computes nothing; give 1 or more")
    try:
        from kvarto.ops.reference.backend import ReferenceBackend
    except ImportError as error:
        raise UsageError(f"the reference backend needs PyTorch ({error}); `pip install 'kvarto[torch]'`") from error
    return ReferenceBackend(config.device, config.threads or read_limits().num_cpus)


def weights_dtype(config: EngineConfig) -> DType:
    """How weights are kept in memory. Raises UsageError."""
    return DType.F32 if config.dtype == "auto" else _float_dtype("--dtype", config.dtype)


def kv_dtype(config: EngineConfig, backend: Backend) -> DType:
    """How KV is kept in pages. Raises UsageError."""
    if config.kv_cache_dtype == "auto":
        return backend.default_kv_dtype()
    return _float_dtype("--kv-cache-dtype", config.kv_cache_dtype)


def step_limits(config: EngineConfig, program: Program) -> StepLimits:
    """The largest step. Raises UsageError for limits that contradict each other or the model."""
    _at_least("--max-num-seqs", config.max_num_seqs, 1)
    _at_least("--max-num-queued", config.max_num_queued, 1)
    _at_least("--max-num-batched-tokens", config.max_num_batched_tokens, 1)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise UsageError(
            f"`--max-num-batched-tokens {config.max_num_batched_tokens}` is less than `--max-num-seqs "
            f"{config.max_num_seqs}`; each running sequence needs a token per step, so raise the first or lower the "
            "second"
        )
    return StepLimits(
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_samples=config.max_num_seqs + PROMPT_LOGPROB_ROWS,
        max_context=_max_context(config, program),
    )


def plan_layout(config: EngineConfig, program: Program, backend: Backend) -> Layout:
    """Where every byte would go. Raises UsageError or BudgetTooSmall."""
    if config.block_size not in BLOCK_SIZES:
        raise UsageError(f"`--block-size {config.block_size}` is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if config.scheduling_policy not in POLICIES:
        raise UsageError(f"`--scheduling-policy {config.scheduling_policy}` is not one of {', '.join(POLICIES)}")
    limits, dtype = step_limits(config, program), kv_dtype(config, backend)
    kv_format = program.kv_format(dtype, config.block_size)
    sizes = {index: backend.scratch_bytes(op, program, limits, kv_format) for index, op in enumerate(program.ops)}
    scratch_bytes = {index: size for index, size in sizes.items() if size}
    process = _memory_limits(backend)
    budget = resolve_budget(
        process,
        default_device_bytes(program, limits, dtype, config.block_size, scratch_bytes),
        device_memory=config.device_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
    )
    usable_bytes = process.arena_bytes
    return plan(program, budget, limits, dtype, config.block_size, scratch_bytes, usable_bytes=usable_bytes)


def _memory_limits(backend: Backend) -> ProcessLimits:
    """Of the memory that holds the arena: the device's own, or this process's share of the machine."""
    host, own = read_limits(), backend.device_memory()
    if own is None:
        return host
    total_bytes, free_bytes = own
    return ProcessLimits(total_bytes=total_bytes, available_bytes=free_bytes, num_cpus=host.num_cpus)


def _max_context(config: EngineConfig, program: Program) -> int:
    if config.max_model_len is None:
        return program.max_positions
    _at_least("--max-model-len", config.max_model_len, 2)
    if config.max_model_len > program.max_positions:
        raise UsageError(
            f"`--max-model-len {config.max_model_len}` is beyond the {program.max_positions} positions that the model "
            "was made for; give at most that"
        )
    return config.max_model_len


def _float_dtype(flag: str, name: str) -> DType:
    if name not in FLOAT_DTYPES:
        raise UsageError(f"`{flag} {name}` is not one of auto, {', '.join(FLOAT_DTYPES)}")
    return DType(name)


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"`{flag} {value}` is too small; give {least} or more")
