"""Logits with adapters that PEFT trained, saved and loads are PEFT's: each alone, and all in mixed batches.

Both backends, in float32: within 1e-4 of PEFT's, absolutely, for the whole model; and the same bits alone and among
others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.base_copies import copies_in
from kvarto.adapters.binding import unsupported
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import targets_of
from kvarto.core.ids import NO_ADAPTER
from kvarto.models.files import open_weights
from kvarto.ops.native import NativeBackend
from tests.adapters.held import held
from tests.adapters.peft_cases import BASES, CASES, NUM_LAYERS, VOCAB_SIZE, Case
from tests.models.paged_model import Logits, PagedModel
from tests.ops.one_op import assert_same_bits

peft = pytest.importorskip("peft", reason="needs PEFT: the package `peft`, 0.18 or newer")
# After the question whether to skip: these two take seconds.
import torch  # noqa: E402
import transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
BUILD = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
}


@dataclass
class World:
    """A base, PEFT's logits of each case, and ours alone; backends stay open with all adapters bound."""

    folder: Path
    peft_logits: dict[int, Logits]
    models: dict[str, PagedModel]
    alone: dict[str, dict[int, Logits]]

    def cases(self) -> list[Case]:
        return [case for case in CASES if case.index in self.peft_logits]


def base_model(name: str) -> Any:
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    for parameter in model.parameters():  # vectors too: biases are zeros and norms ones at first
        parameter.data.normal_(1.0 if parameter.ndim == 1 and parameter.data.max() == 1 else 0.0, 0.15)
    return model


def train(model: Any, case: Case, folder: Path) -> None:
    """Random values in the place of training."""
    torch.manual_seed(case.index)
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **case.options))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name or "trainable_tokens" in name:
            dtype = case.dtypes[0 if "_A" in name else 1]
            scale = parameter.data.abs().mean() if "magnitude" in name else 0.1
            drawn = torch.rand_like(parameter) + 0.5 if "magnitude" in name else torch.randn_like(parameter)
            parameter.data = (drawn * scale).to(getattr(torch, dtype))
    wrapped.save_pretrained(folder)


def logits_by_peft(model: Any, case: Case, folder: Path) -> Logits:
    wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    with torch.no_grad():
        logits: Logits = wrapped(input_ids=torch.tensor([case.prompt])).logits[0].numpy()
    return logits


def opened_adapters(folder: Path, cases: list[Case], model: PagedModel) -> list[Adapter]:
    files, targets = open_weights(folder / "base"), targets_of(model.program)
    adapters = [
        held(open_peft_adapter(folder / case.name, targets, [folder], is_copy=copies_in(files, targets)))
        for case in cases
    ]
    files.close()
    return adapters


def open_model(folder: Path, kind: str) -> PagedModel:
    files = open_weights(folder)
    backend = NativeBackend(2, activations="f32") if kind == "native" else None
    model = PagedModel(
        files, files.config, page_size=16, max_tokens=48, backend=backend, num_pages=1500, max_lora_rank=16
    )
    files.close()
    return model


@pytest.fixture(scope="module", params=BASES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = base_model(request.param)
    model.save_pretrained(folder / "base")
    cases = [case for case in CASES if case.base == request.param]
    made = World(folder, {}, {}, {})
    for case in cases:
        train(model, case, folder / case.name)
        made.peft_logits[case.index] = logits_by_peft(model, case, folder / case.name)
    for kind in ("reference", "native"):
        made.models[kind] = opened = open_model(folder / "base", kind)
        shelf = opened.shelf()
        for case, adapter in zip(cases, opened_adapters(folder, cases, opened), strict=True):
            assert unsupported(adapter) is None, case.name
            assert adapter.max_rank <= 16
            assert shelf.bind(adapter) == cases.index(case)
        made.alone[kind] = {
            case.index: opened.logits([case.prompt], 1, [(handle, case.start)])[0] for handle, case in enumerate(cases)
        }
    yield made
    for opened in made.models.values():
        opened.close()


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_each_adapter_alone_gives_pefts_logits(world: World, kind: str) -> None:
    far = []
    for case in world.cases():
        got, want = world.alone[kind][case.index], world.peft_logits[case.index]
        error = np.abs(got - want).max()
        if not error <= TOLERANCE:
            far.append(f"{case.name}: {error:.2e} of {np.abs(want).max():.1f}, {case.options}, {case.dtypes}")
    assert not far, "\n".join(far)


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_mixed_batches_give_each_the_bits_that_it_has_alone(world: World, kind: str) -> None:
    cases, model = world.cases(), world.models[kind]
    bare = [[5, 4, 3, 2, 90], list(range(30))]
    want = [*(world.alone[kind][case.index] for case in cases), *(model.logits([prompt], 2)[0] for prompt in bare)]
    prompts = [*(case.prompt for case in cases), *bare]
    adapters = [*((handle, case.start) for handle, case in enumerate(cases)), *((NO_ADAPTER, 0) for _ in bare)]
    for got, expected in zip(model.logits(prompts, 3, adapters), want, strict=True):
        assert_same_bits(got, expected)


def test_adapters_change_logits_and_cover_every_feature(world: World) -> None:
    cases = world.cases()
    bare = world.models["native"].logits([case.prompt for case in cases], 4)
    for case, base in zip(cases, bare, strict=True):
        changed = np.abs(world.peft_logits[case.index] - base).max(axis=1) > 0.01
        assert not changed[: case.start].any(), case.name
        assert changed[case.start :].any() or case.start == len(case.prompt), case.name


def test_there_are_more_than_a_hundred() -> None:
    assert len(CASES) >= 100
    assert len({case.name for case in CASES}) == len(CASES)
