"""The limiter and its fakes, built once; a container per test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.limiter.container import Build, Container, build, container

StartContainer = Callable[..., Container]


@pytest.fixture(scope="session")
def built(pytestconfig: pytest.Config) -> Build:
    if not shutil.which("make") or not shutil.which("cc"):
        pytest.skip("needs a C compiler and make")
    assert pytestconfig.cache is not None
    return build(Path(pytestconfig.cache.mkdir("limiter")))


@pytest.fixture
def start(built: Build, tmp_path: Path) -> Iterator[StartContainer]:
    """Start containers: `start("256MiB", num_devices=2)`."""
    with ExitStack() as stack:

        def one(limit: str = "256MiB", **board: Any) -> Container:
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            return stack.enter_context(container(built, folder, limit, **board))

        yield one
