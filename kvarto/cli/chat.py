"""`kvarto chat [MODEL]`: talk to a model, a running server's or one that is served for the length of the chat."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

from cyclopts import Parameter

from kvarto.cli.flags import size
from kvarto.cli.local_server import local_server
from kvarto.core.errors import UsageError


def chat(
    model: str | None = None,
    /,
    *,
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="KVARTO_API_KEY", show_env_var=False)] = None,
    device_memory: Annotated[int | None, Parameter(converter=size)] = None,
    system: str | None = None,
    quick: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    stats: bool = False,
) -> None:
    """Talk to a model in the terminal.

    Parameters
    ----------
    model
        With `--url`, the name to ask the server for; otherwise a folder, GGUF file, hub id or `demo` to serve until
        the chat ends.
    url
        A running server, such as `http://127.0.0.1:8000`.
    api_key
        Sent as a bearer token.
    device_memory
        Bytes for weights, activations and pages together, when the model is served here.
    system
        A system message before the first turn.
    quick
        Ask this, print the answer, and end.
    temperature
        0 is greedy; without it, the model's own default. The same holds for the next three.
    top_p
        Keep the smallest set of tokens whose probability reaches this.
    max_tokens
        Longest answer.
    seed
        Makes sampling repeat itself.
    stats
        After each answer: seconds to the first token, tokens per second.
    """
    from kvarto.cli.conversation import Conversation, talk  # not for `--help`: aiohttp takes a quarter of a second

    if url is not None and device_memory is not None:
        raise UsageError("`--device-memory` is for a model served here; the server at `--url` has its own")
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    settings = {name: value for name, value in sampling.items() if value is not None}
    with _server(url, model, device_memory) as address:
        name = model if url is not None and model is not None else asyncio.run(_first_model(address, api_key))
        conversation = Conversation(address, api_key, name, settings, system)
        if quick is None:
            talk(conversation, shows_stats=stats)
        else:
            timing = asyncio.run(conversation.ask(quick, lambda piece: print(piece, end="", flush=True)))
            print(f"\n[{timing}]" if stats else "")


def _server(url: str | None, model: str | None, device_memory: int | None) -> AbstractContextManager[str]:
    if url is not None:
        return nullcontext(url)
    budget = [] if device_memory is None else ["--device-memory", str(device_memory)]
    return local_server([model or "demo", *budget])


async def _first_model(url: str, api_key: str | None) -> str:
    from kvarto.cli.openai_client import OpenAIClient

    async with OpenAIClient(url, api_key=api_key) as client:
        return (await client.models())[0]
