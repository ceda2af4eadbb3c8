"""Settings of the HTTP server. The command line is built from it: a field is a flag, its docstring is the help."""

from __future__ import annotations

import msgspec


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvarto serve` asks of the server in front of the engine."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every one of this machine."""
    port: int = 8000
    """TCP port; 0 takes a free one, which is printed."""
    uds: str | None = None
    """Listen on a Unix socket with this path instead of TCP; only this user may connect."""
    api_key: tuple[str, ...] = ()
    """Accepted keys; with none given, everybody may ask. Health and metrics stay open."""
    admin_key: tuple[str, ...] = ()
    """Keys that may load and unload adapters at run time, and ask; with none given, nobody may."""
    served_model_name: tuple[str, ...] = ()
    """Names by which clients call the model; the first one is used in answers. Without it, the model's own."""
    root_path: str = ""
    """Path prefix under which a proxy publishes this server."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server (CORS); `*` for any."""
    ssl_keyfile: str | None = None
    """Private key for HTTPS."""
    ssl_certfile: str | None = None
    """Certificate for HTTPS."""
    max_request_bytes: int = 16 << 20
    """Largest body of a request; larger ones are answered 413."""
    generation_config: str = "auto"
    """Sampling defaults: `auto` takes the model's generation_config.json, `vllm` neutral ones (temperature 1, …)."""
    strict_fields: bool = False
    """Refuse fields that are not known, instead of naming them once in the log."""
    engine_silence_limit_s: float = 120.0
    """Seconds without a word from the engine after which it is replaced; must exceed the longest step."""
    access_log: bool = False
    """One log line per HTTP request. Bodies are never logged."""
