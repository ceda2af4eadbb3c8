"""How does paging reduce fragmentation, on the complete public traces? Ends with one JSON line.

Traces are read from `../shared/data/traces`, beside the checkout; `kvarto bench memory --trace FILE` takes any other.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kvarto.cli.memory_table import print_study
from kvarto.cli.trace_file import open_trace
from kvarto.core.units import GIB
from kvarto.planning.paging_study import Study, StudySettings, run_study

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
BUDGETS = {
    "azure_llm_2023_conv.csv": 8 * GIB,
    "azure_llm_2023_code.csv": 8 * GIB,
    "mooncake_conversation.jsonl": 32 * GIB,  # prompts are ten times as long
}


def figures(study: Study, seconds: float) -> dict[str, object]:
    """What a reader of the JSON line wants: waste, concurrency over the best oracle's, hits."""
    return {
        "trace": study.trace,
        "seconds": round(seconds, 1),
        "waste_percent": {row.policy: round(100 * row.waste_fraction, 3) for row in study.rows if row.kind == "pages"},
        "oracle_share": {row.policy: round(row.oracle_share, 3) for row in study.rows},
        "ideal_hits": round(study.hit_curve[-1].hit_fraction, 4) if study.hit_curve else None,
    }


def main() -> None:
    """Study each trace that is there."""
    found = {name: budget for name, budget in BUDGETS.items() if (TRACES / name).is_file()}
    if not found:
        sys.exit(f"no traces in {TRACES}; name one: kvarto bench memory --trace FILE")
    results = []
    for name, budget in found.items():
        began_s = time.perf_counter()
        study = run_study(open_trace(TRACES / name), StudySettings(budget_bytes=budget))
        results.append(figures(study, time.perf_counter() - began_s))
        print_study(study)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
