"""Small models for whole programs: every family that the table of tests/models has, and quantised ones in memory."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers

from kvarto.models.base import Float32, RawRows, WeightFiles
from kvarto.models.files import open_weights
from tests.models.family_cases import CASES, VOCAB_SIZE
from tests.models.test_families import draw_weights

PROMPT_LENGTHS = (90, 1, 37, 16, 61)


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 5) -> list[list[int]]:
    """Random ids."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def family_files(name: str, folder: Path, **sizes: Any) -> WeightFiles:
    """Random weights of a family, with `sizes` in the place of the table's."""
    case = CASES[name]
    settings = copy.deepcopy(case.settings) | sizes
    model = transformers.AutoModelForCausalLM.from_config(case.config(**settings)).eval()
    draw_weights(model, case)
    model.save_pretrained(folder)
    return open_weights(folder)


class QuantisedFiles(WeightFiles):
    """The matrices of other files in a GGUF type, name by name; vectors as they are."""

    def __init__(self, files: WeightFiles, types: tuple[str, ...]) -> None:
        self._files = files
        self.path, self.config = files.path, files.config
        matrices = [name for name, info in files.tensors.items() if len(info.shape) > 1]
        self._types = {name: types[index % len(types)] for index, name in enumerate(sorted(matrices))}
        self.tensors = {
            name: replace(info, file_dtype=self._types.get(name, info.file_dtype))
            for name, info in files.tensors.items()
        }

    def read_rows(self, name: str, start: int, stop: int) -> Float32:
        """What the codes mean, so that the reference backend has the same weights."""
        if name not in self._types:
            return self._files.read_rows(name, start, stop)
        quant = gguf.GGMLQuantizationType[self._types[name]]
        rows: Float32 = gguf.dequantize(self.read_raw_rows(name, start, stop), quant)
        return rows

    def has_raw_rows(self, name: str, *, is_transposed: bool) -> bool:
        return not is_transposed

    def read_raw_rows(self, name: str, start: int, stop: int) -> RawRows:
        if name not in self._types:
            return self._files.read_raw_rows(name, start, stop)
        values = np.ascontiguousarray(self._files.read_rows(name, start, stop))
        rows: RawRows = gguf.quantize(values, gguf.GGMLQuantizationType[self._types[name]])
        return rows

    def close(self) -> None:
        self._files.close()
