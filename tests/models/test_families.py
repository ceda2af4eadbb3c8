"""Every family: our logits equal those of transformers, and the test would notice a key that is read wrongly.

Weights are drawn so that logits have a standard deviation of at least 3 and scores reach the softcaps; prompts are
longer than the windows and than the original length of scaled rotations. Ours go through files, loader and pages, in
ragged batches of random chunks. Then every key of the configuration is changed, in our config alone: the logits must
change by 100 times the tolerance, or the model must be refused.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models.base import WeightFiles
from kvarto.models.config import parse_config
from kvarto.models.config_keys import ConfigKeys
from kvarto.models.families import FAMILIES
from kvarto.models.files import open_weights
from tests.models.family_cases import CASES, DELETE, VOCAB_SIZE, Case, Change
from tests.models.paged_model import Logits, PagedModel

TOLERANCE = 1e-4
"""Of the largest logit. Both sides are float32 and differ in the order of their sums: measured, up to 3e-6."""
NOTICEABLE = 100 * TOLERANCE
PROMPT_LENGTHS = (90, 1, 37, 16, 61)


@dataclass
class Model:
    """One case on disk, with what transformers says about it."""

    case: Case
    files: WeightFiles
    prompts: list[list[int]]
    expected: list[Logits]

    @property
    def largest(self) -> float:
        return max(float(np.abs(logits).max()) for logits in self.expected)

    def open(self, change: Change | None = None, *, page_size: int = 16, max_tokens: int = 96) -> PagedModel:
        return PagedModel(
            self.files, changed(self.files.config, change or {}), page_size=page_size, max_tokens=max_tokens
        )


def changed(config: dict[str, Any], change: Change) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for path, value in change.items():
        *parents, key = path.split(".")
        level = config
        for parent in parents:
            level = level.setdefault(parent, {})
        if value is DELETE:
            level.pop(key, None)
        else:
            level[key] = value
    return config


def draw_weights(model: torch.nn.Module, case: Case) -> None:
    """Every product keeps a spread of about 1 but for the last, which gets about 5."""
    generator = torch.Generator().manual_seed(11)
    is_gemma = model.config.model_type.startswith("gemma")
    is_transposed = model.config.model_type == "gpt2"
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or ".ln_" in name:
            centre = 0.0 if is_gemma or name.endswith("bias") else 1.0
            parameter.data = centre + 0.2 * noise
        elif parameter.dim() == 1:
            parameter.data = 0.3 * noise
        elif "embed" in name or "wte" in name or "wpe" in name:
            parameter.data = noise
        else:
            fan_in = parameter.shape[0] if is_transposed and "lm_head" not in name else parameter.shape[-1]
            gain = case.score_gain if "q_proj" in name or "k_proj" in name else 1.0
            gain = 5.0 if "lm_head" in name else 2.0 if name.endswith("mlp.gate.weight") else gain
            parameter.data = gain * fan_in**-0.5 * noise


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    case = CASES[request.param]
    config = case.config(**copy.deepcopy(case.settings))
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(reference, case)
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    with torch.no_grad():
        expected = [reference(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]
    files = open_weights(folder)
    yield Model(case, files, prompts, expected)
    files.close()


def test_logits_equal_those_of_transformers(model: Model) -> None:
    assert np.concatenate(model.expected).std() >= 3.0
    longest = max(PROMPT_LENGTHS)
    assert all(layer.window is None or longest > 4 * layer.window for layer in parse_config(model.files.config).layers)
    rope = model.files.config.get("rope_parameters", {})
    assert longest > 2 * rope.get("original_max_position_embeddings", 0)
    for page_size, max_tokens, seed in ((8, 40, 1), (16, 96, 2)):
        paged = model.open(page_size=page_size, max_tokens=max_tokens)
        for ours, expected in zip(paged.logits(model.prompts, seed), model.expected, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE * model.largest)
        paged.close()


def test_every_change_of_the_config_is_noticed(model: Model) -> None:
    unchanged = model.expected[0]
    for key, change in model.case.changes.items():
        paged = model.open(change)
        difference = float(np.abs(paged.whole(model.prompts[0]) - unchanged).max())
        paged.close()
        assert difference >= NOTICEABLE * model.largest, f"{key}: {difference / model.largest}"


def test_every_change_that_does_not_fit_is_refused(model: Model) -> None:
    for key, change in model.case.refused.items():
        try:
            paged = model.open(change)
        except (BadFile, UnsupportedModel):
            continue
        paged.close()
        pytest.fail(f"{key}: {change} was accepted")


def test_every_key_that_transformers_writes_is_accounted_for(model: Model) -> None:
    assert parse_config(model.files.config).unknown_keys == ()


def test_the_context_length_is_that_of_the_config(model: Model) -> None:
    key = "n_positions" if "n_positions" in model.files.config else "max_position_embeddings"
    assert parse_config(changed(model.files.config, {key: 77})).max_positions == 77


def test_the_language_model_inside_a_multimodal_gemma3(tmp_path: Path) -> None:
    case = CASES["gemma3"]
    config = transformers.Gemma3Config(
        # transformers leaves the softcap of the logits out of its multimodal class; no published file has one.
        text_config=copy.deepcopy(case.settings) | {"final_logit_softcapping": None},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=VOCAB_SIZE - 1, boi_token_index=0, eoi_token_index=1,
    )  # fmt: skip
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(reference, case)
    reference.save_pretrained(tmp_path)
    prompt = [2 + index * 7 % (VOCAB_SIZE - 3) for index in range(90)]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0].numpy()
    files = open_weights(tmp_path)
    paged = PagedModel(files, files.config, page_size=8, max_tokens=96)
    np.testing.assert_allclose(paged.whole(prompt), expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    paged.close()
    files.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_changes_every_key_that_a_family_reads(family: str) -> None:
    """Also those that it asks for in vain, in all the ways in which the table spells its models."""
    read: set[str] = set()
    tested = {"max_position_embeddings"}
    for case in CASES.values():
        config = case.config(**copy.deepcopy(case.settings)).to_dict()
        if config["model_type"] != family:
            continue
        tested |= set(case.changes) | set(case.refused)
        for change in ({}, *case.changes.values()):
            keys = ConfigKeys(changed(config, change), family)
            FAMILIES[family](keys)
            read |= keys.read
    assert read
    spelled_otherwise = {key for key in read if key.startswith("rope_scaling.")}
    assert read - tested - spelled_otherwise == set()
