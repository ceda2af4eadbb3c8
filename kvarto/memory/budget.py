"""From flags to one number: how many bytes of device memory this process may use, whatever others do."""

from __future__ import annotations

from kvarto.core.errors import UsageError
from kvarto.core.layout import Budget
from kvarto.core.units import format_bytes
from kvarto.memory.limits import ProcessLimits

DEFAULT_SHARE = 0.5
"""Of what is free: a server that nobody sized should leave the machine usable."""


def resolve_budget(
    limits: ProcessLimits,
    default_bytes: int,
    *,
    device_memory: int | None = None,
    gpu_memory_utilization: float | None = None,
    kv_cache_memory_bytes: int | None = None,
) -> Budget:
    """The budget that the flags ask for. Raises UsageError for values and combinations that cannot work.

    `default_bytes` is what the plan would like when nobody asked: it is taken as far as half of what is free goes. On a
    GPU whose share was already limited for this container, the limit is the budget.
    `kv_cache_memory_bytes` fixes the pages alone, and goes together with either of the others, which then is the
    ceiling of weights, activations and pages.
    """
    if device_memory is not None and gpu_memory_utilization is not None:
        raise UsageError(
            "`--device-memory` and `--gpu-memory-utilization` both set the budget of the device; give one of them"
        )
    if gpu_memory_utilization is not None:
        device_bytes, source = _share(gpu_memory_utilization, limits)
    elif device_memory is not None:
        device_bytes, source = _positive("--device-memory", device_memory)
    elif kv_cache_memory_bytes is not None:
        device_bytes, source = limits.arena_bytes, "what is free"
    else:
        device_bytes, source = _default(default_bytes, limits)
    return _with_kv(device_bytes, source, kv_cache_memory_bytes, limits)


def _with_kv(device_bytes: int, source: str, kv_bytes: int | None, limits: ProcessLimits) -> Budget:
    if device_bytes > limits.arena_bytes:
        raise UsageError(
            f"{source} asks for {format_bytes(device_bytes)}; of the {format_bytes(limits.usable_bytes)} that this "
            f"process may use ({_where(limits)}) {format_bytes(limits.free_bytes)} are free, and some of that is for "
            f"the process itself: free some, or give at most `--device-memory {limits.arena_bytes}`"
        )
    if kv_bytes is None:
        return Budget(device_bytes, source)
    _, kv_source = _positive("--kv-cache-memory-bytes", kv_bytes)
    if kv_bytes > device_bytes:
        raise UsageError(
            f"{kv_source} is more than the {format_bytes(device_bytes)} of the device ({source}) that pages share with "
            f"weights and activations; give a smaller `--kv-cache-memory-bytes`"
        )
    return Budget(device_bytes, f"{kv_source} within {source}", kv_bytes)


def _share(share: float, limits: ProcessLimits) -> tuple[int, str]:
    if not 0 < share <= 1:  # refuses NaN too
        raise UsageError(f"`--gpu-memory-utilization {share}` is not a share; give more than 0 and at most 1, like 0.9")
    device_bytes = int(share * limits.usable_bytes)
    of = f"{format_bytes(limits.usable_bytes)}, {_where(limits)}"
    return device_bytes, f"`--gpu-memory-utilization {share}` of {of}"


def _positive(flag: str, size_bytes: int) -> tuple[int, str]:
    if size_bytes <= 0:
        raise UsageError(f"`{flag} {size_bytes}` is not a size; give bytes or a size such as `8GiB`")
    return size_bytes, f"`{flag} {format_bytes(size_bytes).replace(' ', '')}`"


def _default(default_bytes: int, limits: ProcessLimits) -> tuple[int, str]:
    if limits.device_limit is not None and limits.sized_bytes is not None:
        # The pod was sized for this process: whatever it does not take, nobody else may.
        return limits.sized_bytes, f"{limits.device_limit.source}, less what the driver takes"
    ceiling = int(limits.free_bytes * DEFAULT_SHARE)
    if default_bytes <= ceiling:
        return default_bytes, "default"
    return ceiling, f"default: half of the {format_bytes(limits.free_bytes)} that are free"


def _where(limits: ProcessLimits) -> str:
    if limits.device_limit is not None and limits.device_limit.limit_bytes < limits.total_bytes:
        return f"the limit that {limits.device_limit.source} sets"
    is_group = limits.cgroup_limit_bytes is not None and limits.cgroup_limit_bytes < limits.total_bytes
    return "the limit of the control group" if is_group else "the memory of the machine"
