"""What is shipped beside the package: the image's recipe and the dashboard."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvarto.cluster.deployment import LIMITER_LEDGER, LIMITER_LIBRARY, MODELS, PORT, USER_ID
from kvarto.engine.messages import Ready, Stats
from kvarto.server.metrics import ServerMetrics, exposition

DEPLOY = Path(__file__).parents[2] / "deploy"
CONTAINERFILE = DEPLOY / "Containerfile"
GRID_WIDTH = 24
_NAME = re.compile(r"\b((?:vllm|kvarto):[a-z0-9_]+|http_[a-z_]+|process_[a-z_]+)\b")
_LABELS = re.compile(r"by \(([a-z_, ]+)\)|\{\{([a-z_]+)\}\}")


def dashboard() -> dict[str, Any]:
    loaded = json.loads((DEPLOY / "grafana/kvarto.json").read_text())
    assert isinstance(loaded, dict)
    return loaded


def series() -> dict[str, set[str]]:
    """Name of every series that the server shows, with its labels."""
    stats = Stats(region_bytes={"weights": 1, "pages_kv": 2})
    ready = Ready(
        model_name="m", fingerprint="f", vocab_size=1, max_model_len=1, page_size=16, num_pages=1, max_concurrency=1.0,
        layout="", phases=(),
    )  # fmt: skip
    metrics = ServerMetrics()
    metrics.http_answered("/v1/models", "GET", 200)
    text = exposition(metrics, stats, ready, "m").decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_asks_only_for_what_the_server_shows() -> None:
    shown = series()
    asked = set()
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            names = set(_NAME.findall(target["expr"]))
            assert names, target["expr"]
            asked |= names
            assert names <= shown.keys(), names - shown.keys()
            written = _LABELS.findall(target["expr"] + target["legendFormat"])
            labels = {label for pair in written for label in pair if label}
            of_series = {"job", "instance"}.union(*(shown[name] for name in names))
            assert {part.strip() for label in labels for part in label.split(",")} <= of_series
    assert {name for name in shown if name.startswith("kvarto:")} & asked >= {"kvarto:pool_bytes", "kvarto:pages"}


def test_the_dashboards_panels_lie_side_by_side() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= GRID_WIDTH
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_the_recipe_of_the_image_passes_its_linter() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.exists():
        found = shutil.which("hadolint")
        assert found is not None, "hadolint comes with the development tools: pip install 'kvarto[dev]'"
        linter = Path(found)
    result = subprocess.run([linter, "--no-color", CONTAINERFILE], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_image_is_what_the_manifests_expect() -> None:
    text = CONTAINERFILE.read_text()
    final = text[text.rindex("\nFROM ") :]
    assert f"USER {USER_ID}:{USER_ID}" in final
    assert f"EXPOSE {PORT}" in final
    assert LIMITER_LIBRARY in final
    assert re.search(rf"install .* {MODELS} {LIMITER_LEDGER}\b", final)
    assert re.findall(r"^ARG (\w+)=\"\"$", text, re.M) == ["EXTRAS"], "PyTorch only comes when it is asked for"


def test_everything_that_the_image_copies_is_there_and_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE.read_text(), re.M)
    names = [name for line in copied for name in line.split()]
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert names
    for name in names:
        assert (DEPLOY.parent / name).exists(), name
        assert name in kept, name
