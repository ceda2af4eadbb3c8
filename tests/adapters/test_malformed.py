"""Broken adapters: each is refused with an AdapterError that says why, quickly, and without asking for memory."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from kvarto.adapters.gguf_files import open_gguf_adapter
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import targets_of
from kvarto.core.errors import AdapterError
from tests.adapters.bases import program_of
from tests.adapters.held import held
from tests.adapters.malformed import BREAKS
from tests.adapters.writer import write_adapter
from tests.models.gguf_bytes import gguf_bytes

BASE = targets_of(program_of())
SEEDS = 5
MOST_BYTES = 48 << 20
"""Of Python's memory and numpy's; the JSON of 40,000 tensors takes 30 MB before they can be counted."""


def test_there_are_enough() -> None:
    assert len(BREAKS) * SEEDS >= 300


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_adapter_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    broken, why = BREAKS[name]
    for seed in range(1 if name in ("too many tensors", "config long") else SEEDS):
        written = write_adapter(tmp_path / "root" / str(seed), BASE)
        broken(random.Random(seed), written)
        tracemalloc.start()
        with pytest.raises(AdapterError) as caught:
            open_peft_adapter(written.folder, BASE, [tmp_path / "root"])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert re.search(why, str(caught.value)), (seed, str(caught.value))
        assert len(str(caught.value)) < 1500, (seed, str(caught.value))
        assert peak < MOST_BYTES, (seed, peak)


def test_random_bytes_anywhere_are_a_good_adapter_or_an_adapter_error(tmp_path: Path) -> None:
    rng = random.Random(11)
    written = write_adapter(tmp_path / "a", BASE)
    num_refused = 0
    for _ in range(200):
        written.save()
        path = written.folder / rng.choice(("adapter_config.json", "adapter_model.safetensors"))
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(min(len(data), 1200))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            for array in held(open_peft_adapter(written.folder, BASE, [tmp_path])).arrays():
                array.read()
        except AdapterError:
            num_refused += 1
    assert num_refused > 100


def test_every_number_of_a_gguf_file_may_lie(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0,
        "adapter.alora.invocation_tokens": [3, 4],
    }  # fmt: skip
    tensors = {
        "blk.0.attn_q.weight.lora_a": (np.ones((4, 32)), Q.F32),
        "blk.0.attn_q.weight.lora_b": (np.ones((32, 4)), Q.F32),
    }
    good = gguf_bytes(metadata, tensors)
    path = tmp_path / "a.gguf"
    num_refused = num_tried = 0
    for number in good.numbers:
        for value in (0, 1, 7, 255, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1):
            if value >= 1 << (8 * struct.calcsize(number.layout)):
                continue
            data = bytearray(good.data)
            struct.pack_into(number.layout, data, number.offset, value)
            path.write_bytes(data)
            num_tried += data != good.data
            tracemalloc.start()
            try:
                for array in held(open_gguf_adapter(path, BASE, [tmp_path])).arrays():
                    array.read()
            except AdapterError:
                num_refused += 1
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < MOST_BYTES, (number, value)
    assert num_tried > 200
    assert num_refused > 0.9 * num_tried
