"""`kvarto plan MODEL`: where every byte would go, and whether it fits. Weights are not loaded, nothing is reserved."""

from __future__ import annotations

import sys

import msgspec

from kvarto.cli.flags import takes
from kvarto.core.errors import BudgetTooSmall
from kvarto.engine.config import EngineConfig

FITS, DOES_NOT_FIT = 0, 1


@takes(engine=EngineConfig)
def plan(*, engine: EngineConfig) -> int:
    """Print where every byte would go, without loading weights.

    The flags are those of `kvarto serve`, and so is the answer: a server started with them takes exactly this.
    Exit code 0: it fits; 1: it doesn't, and the message ends with flags that would work; 2: the flags are wrong.
    """
    from kvarto.engine.adapter_plan import adapter_table, plan_adapters
    from kvarto.engine.assemble import plan_engine
    from kvarto.engine.settings import check_settings
    from kvarto.models.hub import resolve
    from kvarto.planning.table import layout_table

    check_settings(engine)
    path = resolve(engine.model, lambda line: print(line, file=sys.stderr))
    engine = msgspec.structs.replace(engine, model=str(path))
    try:
        program, layout = plan_engine(engine)
    except BudgetTooSmall as error:
        print(error)
        return DOES_NOT_FIT
    print(layout_table(layout, program))
    if planned := plan_adapters(engine, program, layout):
        print()
        print(adapter_table(planned, layout, engine.adapter_host_memory))
    return FITS
