"""Adapters over HTTP: which name is one, how they are listed, and how an operator loads and unloads them.

The shapes of the two POSTs are vLLM's. They need an admin key, for a path is read from this machine; which paths may be
read the engine decides, by the folders that were named at start.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from kvarto.engine.messages import AdapterInfo
from kvarto.server.errors import Forbidden, Unauthorized
from kvarto.server.protocol import AdapterCard, LoadAdapterRequest, UnloadAdapterRequest
from kvarto.server.service import Service


async def adapter_cards(service: Service) -> list[AdapterCard]:
    """A card for each registered adapter. Raises Unavailable."""
    if not service.engine.adapters.names:
        return []
    return [_card(service, info) for info in await service.engine.adapters.list()]


async def load_adapter(service: Service, request: Request) -> Response:
    """Answer POST /v1/load_lora_adapter. A name that is loaded already means the new files from now on."""
    _require_admin(service, request)
    body = await service.bodies.read(request, LoadAdapterRequest)
    service.model.refuse_own_name(body.lora_name)
    info = await service.engine.adapters.load(body.lora_name, Path(body.lora_path))
    warnings = "".join(f" Warning: {warning}." for warning in info.warnings)
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' added successfully.{warnings}")


async def unload_adapter(service: Service, request: Request) -> Response:
    """Answer POST /v1/unload_lora_adapter. Requests that came before finish."""
    _require_admin(service, request)
    body = await service.bodies.read(request, UnloadAdapterRequest)
    info = await service.engine.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' removed successfully.")


def _card(service: Service, info: AdapterInfo) -> AdapterCard:
    return AdapterCard(
        id=info.name,
        created=service.model.created,
        root=Path(info.path).name,  # no folders of this machine
        parent=service.model.name,
        max_model_len=service.engine.ready.max_model_len,
        rank=info.rank,
        size_bytes=info.size_bytes,
        num_pages=info.num_pages,
        dtype=info.dtype,
        tier=info.tier,
        num_requests=info.num_requests,
    )


def _require_admin(service: Service, request: Request) -> None:
    keys = service.config.admin_key
    if not keys:
        raise Forbidden("adapters can be loaded and unloaded where the server was started with `--admin-key`")
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    offered = key.strip().encode("latin-1")
    accepted = [hmac.compare_digest(offered, known.encode()) for known in keys]  # all of them: no early end
    if scheme.lower() != "bearer" or not any(accepted):
        raise Unauthorized("this path needs an admin key; send `Authorization: Bearer KEY`")
