"""What the routes share: the engine, the model, the readers of bodies and prompts, and the counts."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.engine.client import EngineClient
from kvarto.server.body import BodyReader
from kvarto.server.config import ServerConfig
from kvarto.server.metrics import ServerMetrics
from kvarto.server.prompts import Prompts
from kvarto.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Service:
    """One server: made at start-up, passed to whatever answers requests."""

    engine: EngineClient
    model: ServedModel
    config: ServerConfig
    bodies: BodyReader
    prompts: Prompts
    metrics: ServerMetrics

    def adapter_of(self, asked: str | None) -> str | None:
        """The adapter that is asked for as a model; None: the base. Raises NotFound."""
        return self.model.adapter_of(asked, self.engine.adapters.names)
