"""`kvarto serve [MODEL]`: an OpenAI-compatible server on one model."""

from __future__ import annotations

from kvarto.cli.flags import takes
from kvarto.engine.config import EngineConfig
from kvarto.server.config import ServerConfig


@takes(engine=EngineConfig, server=ServerConfig)
def serve(*, engine: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    MODEL is a folder, a GGUF file, a hub id (`org/name`, `org/name:Q4_K_M`), or `demo`: SmolLM2-135M-Instruct.
    """
    from kvarto.server import run

    run(server, engine)
