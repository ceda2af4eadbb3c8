"""The HTTP application: which path is answered by what, and what stands around all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from kvarto.core.errors import NotFound
from kvarto.server.adapters import adapter_cards, load_adapter, unload_adapter
from kvarto.server.chat import create_chat_completion
from kvarto.server.completions import create_completion
from kvarto.server.errors import install_handlers
from kvarto.server.metrics import CONTENT_TYPE, exposition
from kvarto.server.middleware import Counted, DirectBody, Keys, RequestId, RootPath
from kvarto.server.protocol import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    ErrorAnswer,
    LoadAdapterRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from kvarto.server.service import Service
from kvarto.server.startup import package_version
from kvarto.server.texts import detokenize, tokenize

_MODEL_PREFIX = "/v1/models/"
_Structs = type[msgspec.Struct]


def build_app(service: Service) -> ASGIApp:
    """The whole application, middleware included."""
    api = FastAPI(title="Kvarto", version=package_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_api(api, service)
    _add_probes(api, service)
    install_handlers(api)
    paths = {getattr(route, "path", "") for route in api.routes} - {f"{_MODEL_PREFIX}{{model_id:path}}"}
    app: ASGIApp = RootPath(api, service.config.root_path) if service.config.root_path else api
    if service.config.api_key:
        app = Keys(app, service.config.api_key + service.config.admin_key, service.config.root_path)
    if service.config.allowed_origins:
        app = CORSMiddleware(
            app, allow_origins=service.config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app = Counted(app, service.metrics.http_answered, paths, _MODEL_PREFIX)
    return DirectBody(RequestId(app, package_version()))


def _add_api(api: FastAPI, service: Service) -> None:
    async def completions(request: Request) -> Response:
        return await create_completion(service, request)

    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(service, request)

    async def models(request: Request) -> Response:
        return _json(ModelList(data=await _cards(service)))

    async def model(request: Request, model_id: str) -> Response:
        service.adapter_of(model_id)
        card = next((card for card in await _cards(service) if card.id == model_id), None)
        if card is None:  # an adapter that was unloaded meanwhile
            raise NotFound(f"the model `{model_id[:200]}` is not served here any more", param="model")
        return _json(card)

    async def load_lora_adapter(request: Request) -> Response:
        return await load_adapter(service, request)

    async def unload_lora_adapter(request: Request) -> Response:
        return await unload_adapter(service, request)

    async def tokens_of(request: Request) -> Response:
        return _json(await tokenize(service, request))

    async def text_of(request: Request) -> Response:
        return _json(await detokenize(service, request))

    _post(api, "/v1/completions", completions, CompletionRequest, Completion)
    _post(api, "/v1/chat/completions", chat_completions, ChatRequest, ChatCompletion)
    _post(api, "/tokenize", tokens_of, TokenizeRequest, TokenizeAnswer)
    _post(api, "/detokenize", text_of, DetokenizeRequest, DetokenizeAnswer)
    _post(api, "/v1/load_lora_adapter", load_lora_adapter, LoadAdapterRequest)
    _post(api, "/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapterRequest)
    _get(api, "/v1/models", models, ModelList)
    _get(api, _MODEL_PREFIX + "{model_id:path}", model, ModelCard)


def _add_probes(api: FastAPI, service: Service) -> None:
    engine = service.engine

    async def live(request: Request) -> Response:
        return _probe(engine.is_alive, engine.state.value)

    async def ready(request: Request) -> Response:
        return _probe(engine.can_admit, "draining" if engine.is_draining else engine.state.value)

    async def versions(request: Request) -> Response:
        return Response(msgspec.json.encode({"version": package_version()}), media_type="application/json")

    async def metrics(request: Request) -> Response:
        text = exposition(service.metrics, await engine.stats(), engine.ready, service.model.name)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    for path in ("/health", "/livez", "/ping"):
        _get(api, path, live)
    _get(api, "/readyz", ready)
    _get(api, "/version", versions)
    _get(api, "/metrics", metrics)


async def _cards(service: Service) -> list[ModelCard]:
    """The base under each of its names, then its adapters."""
    model, limit = service.model, service.engine.ready.max_model_len
    own = [ModelCard(id=name, created=model.created, root=model.root, max_model_len=limit) for name in model.names]
    return [*own, *await adapter_cards(service)]


def _probe(is_well: bool, state: str) -> Response:
    status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(msgspec.json.encode({"status": state}), status_code=status, media_type="application/json")


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _get(api: FastAPI, path: str, handler: Callable[..., Awaitable[Response]], answer: _Structs | None = None) -> None:
    api.add_api_route(path, handler, methods=["GET"], response_model=None, responses=_responses(answer))


def _post(
    api: FastAPI,
    path: str,
    handler: Callable[..., Awaitable[Response]],
    body: _Structs,
    answer: _Structs | None = None,
) -> None:
    """Bodies are read by `BodyReader`, so their schema is told to OpenAPI by hand."""
    content = {"application/json": {"schema": _schema(body)}}
    api.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_model=None,
        responses=_responses(answer),
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


def _responses(answer: _Structs | None) -> dict[int | str, dict[str, Any]]:
    listed: dict[int | str, dict[str, Any]] = {
        "default": {"description": "An error", "content": {"application/json": {"schema": _schema(ErrorAnswer)}}}
    }
    if answer is not None:
        listed[200] = {"description": "The answer", "content": {"application/json": {"schema": _schema(answer)}}}
    return listed


def _schema(kind: _Structs) -> dict[str, Any]:
    """A JSON schema without references, so that it can stand anywhere in the OpenAPI file."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    inlined = _inline(schema, components)
    assert isinstance(inlined, dict)
    return inlined


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(components[schema["$ref"]], components)
    return {key: _inline(value, components) for key, value in schema.items()}
