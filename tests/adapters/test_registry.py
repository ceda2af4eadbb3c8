"""Names and versions, over real files: replacing, refusing and unloading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvarto.adapters.files import AdapterLimits
from kvarto.adapters.registry import AdapterVersion, Registry, VersionState
from kvarto.adapters.source import AdapterFiles, adapters_in, look_into
from kvarto.adapters.targets import targets_of
from kvarto.core.clock import MonotonicClock
from kvarto.core.errors import BadAdapter, KvartoError, UnsupportedAdapter
from kvarto.memory.calls import Calls
from tests.adapters.bases import program_of
from tests.adapters.held import HASHER
from tests.adapters.pages import in_order
from tests.adapters.writer import Options, write_adapter

PAGE = 4096


class World:
    """A registry over one folder."""

    def __init__(self, root: Path) -> None:
        self.base = targets_of(program_of())
        self.root = root
        self.calls = Calls(MonotonicClock())
        self.files = AdapterFiles(self.base, [root], PAGE, hasher=HASHER)
        self.gone: list[AdapterVersion] = []
        self.registry = Registry(self.files, self.calls, self.gone.append)
        self.errors: list[KvartoError | None] = []

    def write(self, name: str, **options: object) -> Path:
        return write_adapter(self.root / name, self.base, Options(**options)).folder  # type: ignore[arg-type]

    def load(self, name: str, path: Path) -> AdapterVersion:
        self.registry.load(name, path, lambda version, error: self.errors.append(error))
        self.until(lambda: not self.calls.num_unreported)
        if self.errors[-1] is not None:
            raise self.errors[-1]
        version = self.registry.find(name)
        assert version is not None
        return version

    def identify(self, version: AdapterVersion) -> bytes:
        """Open and read, as the tiers below do."""
        self.until(lambda: self.registry.open(version) or version.error is not None)
        assert version.found is not None, version.error
        images = np.empty((version.num_pages, PAGE), np.uint8)
        self.registry.learn(version, self.files.read(version.found, images, in_order(version.found)).content)
        assert version.digest is not None
        return version.digest

    def until(self, is_met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_met():
            self.calls.poll()
            time.sleep(0.001)
            assert time.monotonic() < deadline
        self.calls.poll()
        self.registry.check()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.calls.close()


def test_equal_contents_under_two_names_have_one_digest(world: World) -> None:
    first = world.load("first", world.write("first", seed=1))
    second = world.load("second", world.write("second", seed=1))
    other = world.load("other", world.write("other", seed=2))
    assert world.identify(first) == world.identify(second) != world.identify(other)
    assert first.num_pages == -(-first.found.adapter.size_bytes // PAGE)  # type: ignore[union-attr]


def test_a_folder_that_changed_is_a_new_version_and_the_old_one_stays_while_it_is_held(world: World) -> None:
    old = world.load("a", world.write("a", seed=1))
    world.registry.hold(old)
    world.write("a", seed=2)
    world.registry.refresh("a")
    world.until(lambda: not world.calls.num_unreported)
    new = world.registry.find("a")
    assert new is not None
    assert new is not old
    assert not old.is_current
    assert world.gone == []
    world.registry.release(old)
    assert world.gone == [old]
    world.registry.refresh("a")
    world.until(lambda: not world.calls.num_unreported)
    assert world.registry.find("a") is new, "unchanged files made a new version"


def test_a_refused_replacement_leaves_the_version_before(world: World) -> None:
    path = world.write("a", seed=1)
    version = world.load("a", path)
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(BadAdapter):
        world.load("a", path)
    assert world.registry.find("a") is version
    with pytest.raises(BadAdapter):
        world.load("b", world.root / "missing")
    assert world.registry.find("b") is None


def test_unloading_lets_the_name_mean_nothing_and_requests_finish(world: World) -> None:
    version = world.load("a", world.write("a"))
    world.registry.hold(version)
    assert world.registry.unload("a") is version
    assert world.registry.find("a") is None
    assert world.registry.unload("a") is None
    assert world.registry.versions == [version]
    world.registry.release(version)
    assert world.registry.versions == []
    assert world.gone == [version]


def test_a_listed_adapter_is_opened_when_it_is_wanted_and_tried_again_after_it_failed(world: World) -> None:
    version = world.registry.list_name("late", world.root / "late")
    assert version.state is VersionState.LISTED
    world.until(lambda: world.registry.open(version) or version.error is not None)
    assert isinstance(version.error, BadAdapter)
    world.write("late")
    version.error = None
    assert len(world.identify(version)) == 32


def test_files_that_lie_outside_the_named_folder_are_refused(world: World, tmp_path: Path) -> None:
    world.root = tmp_path / "inside"
    world.root.mkdir()
    world.files = AdapterFiles(world.base, [world.root], PAGE, hasher=HASHER)
    world.registry = Registry(world.files, world.calls, world.gone.append)
    outside = write_adapter(tmp_path / "outside", world.base).folder
    (world.root / "link").symlink_to(outside)
    with pytest.raises(BadAdapter, match="outside of"):
        world.load("a", world.root / "link")


def test_a_folder_lists_its_adapters_by_name(world: World) -> None:
    world.write("b")
    world.write("a")
    (world.root / "no_adapter").mkdir()
    (world.root / "c.gguf").write_bytes(b"GGUF")
    assert [name for name, _ in adapters_in(world.root)] == ["a", "b", "c"]
    with pytest.raises(BadAdapter, match="cannot be listed"):
        list(adapters_in(world.root / "missing"))


def test_files_that_were_read_are_known_when_they_are_found_again(world: World) -> None:
    version = world.load("a", world.write("a"))
    assert version.digest is None
    digest = world.identify(version)
    assert world.registry.versions_of(digest) == [version]
    world.registry.unload("a")
    assert world.registry.versions_of(digest) == []
    again = world.load("b", version.path)
    assert again.digest == digest
    assert world.registry.versions_of(digest) == [again]
    world.write("a", seed=2)
    assert world.load("b", version.path).digest is None


def test_a_look_sees_what_came_changed_and_went(world: World) -> None:
    world.write("a")
    world.write("b")
    (world.root / "c.gguf").write_bytes(b"GGUF")
    before = look_into([world.root])
    assert list(before) == [name for name, _ in adapters_in(world.root)]
    assert look_into([world.root]) == before
    world.write("b", seed=3, rank=5)
    (world.root / "c.gguf").unlink()
    after = look_into([world.root])
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]
    assert "c" not in after


def test_a_rank_beyond_the_limit_is_refused_with_both_numbers(world: World) -> None:
    world.files = AdapterFiles(world.base, [world.root], PAGE, limits=AdapterLimits(max_rank=3))
    world.registry = Registry(world.files, world.calls, world.gone.append)
    with pytest.raises((BadAdapter, UnsupportedAdapter), match="4"):
        world.load("a", world.write("a", rank=4))
