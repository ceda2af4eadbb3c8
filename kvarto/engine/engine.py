"""Engine: everything of one engine, wired, and what it says of itself. `assemble` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.cache.kv_cache import KVCache
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.engine.adapters import Adapters
from kvarto.engine.loop import EngineLoop
from kvarto.engine.messages import Ready
from kvarto.engine.validate import ModelLimits
from kvarto.memory.ledger import Ledger
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfers
from kvarto.ops.base import Backend
from kvarto.planning.page_count import pages_for_sequence
from kvarto.planning.table import layout_table


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything of one engine, wired. `close` it."""

    loop: EngineLoop
    limits: ModelLimits
    program: Program
    layout: Layout
    backend: Backend
    cache: KVCache
    pool: PagePool
    ledger: Ledger
    transfers: Transfers
    adapters: Adapters | None
    model_name: str
    fingerprint: str
    """Two engines with equal ones give equal bits."""
    process_bytes: int | None
    """Memory of this process when the plan was made; None where the system does not say."""
    phases: tuple[tuple[str, float], ...]

    def ready(self) -> Ready:
        """What the client hears first."""
        return Ready(
            model_name=self.model_name,
            fingerprint=self.fingerprint,
            vocab_size=self.limits.vocab_size,
            max_model_len=self.limits.max_model_len,
            page_size=self.layout.kv_format.page_size,
            num_pages=self.layout.num_pages,
            max_concurrency=self._max_concurrency,
            layout=layout_table(self.layout, self.program, self.process_bytes),
            phases=self.phases,
            adapters=() if self.adapters is None else self.adapters.names,
        )

    @property
    def _max_concurrency(self) -> float:
        layout, limits = self.layout, self.layout.limits
        page_size = layout.kv_format.page_size
        num_each = pages_for_sequence(self.program.layer_groups, page_size, limits.max_context, limits.max_tokens)
        return layout.num_pages / num_each

    def close(self) -> None:
        """Give all memory back. Requests that still run are forgotten."""
        self.loop.forget_all()
        if self.adapters is not None:
            self.adapters.close()
        self.transfers.close()
        self.backend.close()
