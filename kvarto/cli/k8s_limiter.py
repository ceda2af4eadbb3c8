"""`kvarto k8s limiter status`: what the GPU memory limiter has counted in this container."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvarto.core.units import format_bytes

if TYPE_CHECKING:
    from kvarto.cluster.limiter_ledger import LimiterAccount

LEDGER = "KVARTO_GPU_MEMORY_LEDGER"
DEFAULT_LEDGER = "/run/kvarto/gpu-memory.ledger"


def k8s_limiter_status(*, ledger: Path | None = None, json: bool = False) -> None:
    """Show a container's account: limit, use and peak of each device, and what each process holds.

    Counted are allocations that went through the preloaded limiter. What the card really gave this container is the
    driver's knowledge: compare with `nvidia-smi` on the node.

    Parameters
    ----------
    ledger
        The shared account; by default the one that `KVARTO_GPU_MEMORY_LEDGER` names for the limiter itself, or
        `/run/kvarto/gpu-memory.ledger`.
    json
        Print JSON.
    """
    from kvarto.cluster.limiter_ledger import read_account

    account = read_account(ledger or Path(os.environ.get(LEDGER) or DEFAULT_LEDGER))
    print(msgspec.json.format(msgspec.json.encode(_as_dict(account))).decode() if json else _as_text(account))


def _as_dict(account: LimiterAccount) -> dict[str, object]:
    devices = [
        {
            "uuid": device.uuid, "limit_bytes": device.limit_bytes, "used_bytes": device.used_bytes,
            "free_bytes": device.free_bytes, "peak_bytes": device.peak_bytes, "num_refused": device.num_refused,
        }
        for device in account.devices
    ]  # fmt: skip
    return {"devices": devices, "processes": account.processes}


def _as_text(account: LimiterAccount) -> str:
    if not account.devices:
        return "No device has been used under the limiter yet."
    lines = []
    for device in account.devices:
        lines += [
            f"device {device.uuid}",
            f"  limit {format_bytes(device.limit_bytes)}, used {format_bytes(device.used_bytes)}, "
            f"free {format_bytes(device.free_bytes)}, peak {format_bytes(device.peak_bytes)}, "
            f"refused {device.num_refused}",
        ]
        holders = [process for process in account.processes if device.uuid in process.used_bytes]
        for process in sorted(holders, key=lambda process: -process.used_bytes[device.uuid]):
            state = "" if process.is_alive else "  ended; given back when needed"
            size = format_bytes(process.used_bytes[device.uuid])
            lines.append(f"  {process.pid:>8}  {process.name:<16}{size:>12}{state}")
    return "\n".join(lines)
