"""A server's engines share one secret, which nothing shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvarto.adapters.targets import targets_of
from kvarto.cli.flags import flag_parameters
from kvarto.cli.k8s_render import engine_flags
from kvarto.core.digest_fields import PAGE_KEY_BYTES
from kvarto.engine.adapter_parts import adapter_files
from kvarto.engine.assemble import open_program
from kvarto.engine.config import EngineConfig, with_secret
from kvarto.engine.frames import decode_config, encode_frame
from kvarto.engine.settings import open_backend
from tests.adapters.pages import in_order
from tests.adapters.writer import write_adapter
from tests.engine.tiny_model import write_tiny_model

PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    place = tmp_path_factory.mktemp("secret")
    config = EngineConfig(model=str(write_tiny_model(place / "tiny")), adapter_dir=(str(place),))
    files, program = open_program(config, open_backend(config))
    files.close()
    write_adapter(place / "a", targets_of(program))
    return config


def digest(config: EngineConfig) -> bytes:
    """Of one and the same adapter, in an engine that was started with these settings."""
    files, program = open_program(config, open_backend(config))
    files.close()
    adapters = adapter_files(config, program, PAGE_BYTES)
    found = adapters.find(Path(config.adapter_dir[0]) / "a")
    return adapters.read(found, np.empty((found.num_pages, PAGE_BYTES), np.uint8), in_order(found)).content


def test_engines_of_one_server_agree_and_others_do_not(config: EngineConfig) -> None:
    one, two = with_secret(config), with_secret(config)
    received = decode_config(encode_frame(one)[4:])
    assert digest(one) == digest(received)
    assert len({digest(each) for each in (one, two, config, config)}) == 4


def test_a_secret_is_drawn_once_and_shown_nowhere(config: EngineConfig) -> None:
    one = with_secret(config)
    assert with_secret(one) is one
    assert one != with_secret(config)
    key = one.secret.page_key
    assert len(key) == PAGE_KEY_BYTES
    assert "secret" not in {parameter.name for parameter in flag_parameters(EngineConfig)}
    for shown in (repr(one), str(one), f"{one.secret}", " ".join(engine_flags(one))):
        assert repr(key) not in shown
        assert key.hex() not in shown
    assert "--secret" not in engine_flags(one)
