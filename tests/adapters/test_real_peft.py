"""Adapters that PEFT itself saved: the description computes what PEFT's layers do after loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.base_copies import copies_in
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import BaseTargets, Role, targets_of
from kvarto.core.dtype import DType
from kvarto.core.errors import UnsupportedAdapter
from kvarto.core.program import Program
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.files import open_weights
from tests.adapters.held import held
from tests.adapters.parity import lookup, product

peft = pytest.importorskip("peft")
# After the question whether to skip: these two take seconds.
import torch  # noqa: E402
import transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {"vocab_size": 97, "max_position_embeddings": 64}
LLAMA = SIZES | {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}  # fmt: skip
BASES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "tied": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**LLAMA, pad_token_id=0)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_embd=32, n_head=4, n_layer=2, n_positions=64)
    ),
}


@pytest.fixture(scope="module", params=BASES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp(request.param)
    BASES[request.param]().save_pretrained(folder)
    return folder


def trained(base: Path, folder: Path, **config: Any) -> tuple[Any, Adapter, Program]:
    """A model with random adapter weights, saved by PEFT, and read by PEFT and by us.

    PEFT sorts keys when it saves, so patterns may come back in another order: what counts is the model as loaded.
    """
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name or "trainable_tokens" in name:
            parameter.data.normal_(1.0 if "magnitude" in name else 0.0, 0.3)
    wrapped.save_pretrained(folder)
    files = open_weights(base)
    program = build_program(parse_config(files.config), DType.F32)
    targets = targets_of(program)
    adapter = held(open_peft_adapter(folder, targets, [folder], is_copy=copies_in(files, targets)))
    files.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder).eval(), adapter, program


def layers_of(wrapped: Any, targets: BaseTargets) -> Iterator[tuple[str, Any]]:
    for name, module in wrapped.get_base_model().named_modules():
        if name in targets.by_module and hasattr(module, "base_layer"):
            yield name, module


def is_parity(wrapped: Any, adapter: Adapter, program: Program) -> None:
    """Every layer that PEFT wrapped, on random input."""
    targets = targets_of(program)
    num_layers = 0
    for name, layer in layers_of(wrapped, targets):
        target = targets.find(name)
        weight = layer.base_layer.weight.detach().double().numpy()
        num_layers += 1
        if target.role is Role.EMBED:
            tokens = [5, 0, 96, 3]
            expected = layer(torch.tensor(tokens)).detach().numpy()
            np.testing.assert_allclose(lookup(adapter, target.weight, weight, tokens), expected, rtol=1e-4, atol=1e-5)
            continue
        matrix = np.ones((target.first_row + target.out_width, target.in_width))
        matrix[target.first_row :] = weight.T if type(layer.base_layer).__name__ == "Conv1D" else weight
        x = np.random.default_rng(3).normal(size=(4, target.in_width)).astype(np.float32)
        expected = layer(torch.from_numpy(x)).detach().numpy()
        if layer.base_layer.bias is not None:
            bias = layer.base_layer.bias.detach().numpy()
            expected = expected - bias
        bands = [u for u in adapter.updates if u.target == target]
        found = product(Adapter(tuple(bands)), target.weight, matrix, x, target.role)[:, target.first_row :]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert num_layers == len(adapter.updates) > 0


def modules(base: Path) -> list[str]:
    if "gpt2" in base.name:
        return ["c_attn", "c_proj", "c_fc"]
    return ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"] if "phi3" in base.name else LINEARS


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"r": 3, "lora_alpha": 7, "use_rslora": True},
        {"rank_pattern": {"o_proj|c_proj": 2, r".*\.1\..*down_proj": 5}, "alpha_pattern": {"o_proj": 1, ".*proj": 3}},
        {"use_dora": True},
        {"lora_bias": True},
        {"layers_to_transform": [1]},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
        {"alora_invocation_tokens": [4, 5]},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_layers_compute_what_pefts_do(base: Path, options: dict[str, Any], tmp_path: Path) -> None:
    options = options | {"fan_in_fan_out": "gpt2" in base.name}
    wrapped, adapter, program = trained(base, tmp_path / "a", target_modules=modules(base), **options)
    if "alora_invocation_tokens" in options:
        assert adapter.invocation_tokens == (4, 5)
        return
    assert adapter.warnings == ()
    is_parity(wrapped, adapter, program)


def test_embeddings_and_output_matrix(base: Path, tmp_path: Path) -> None:
    names = ["wte" if "gpt2" in base.name else "embed_tokens", "lm_head"]
    wrapped, adapter, program = trained(base, tmp_path / "a", target_modules=names)
    assert sorted(update.target.role for update in adapter.updates) == [Role.EMBED, Role.LOGITS]
    is_parity(wrapped, adapter, program)


def test_tokens_that_were_trained(base: Path, tmp_path: Path) -> None:
    name = "wte" if "gpt2" in base.name else "embed_tokens"
    options = {"target_modules": modules(base)[:1], "trainable_token_indices": {name: [7, 3]}}
    wrapped, adapter, program = trained(base, tmp_path / "a", **options)
    (rows,) = adapter.token_rows
    is_tied = program.ops[0].weights[0] == program.ops[-2].weights[0]
    assert rows.token_ids == (7, 3)
    assert rows.roles == ((Role.EMBED, Role.LOGITS) if is_tied else (Role.EMBED,))
    embed = wrapped.get_base_model().get_input_embeddings()
    table = embed.token_adapter.base_layer.weight.detach().double().numpy()
    expected = embed(torch.tensor([3, 7, 4])).detach().numpy()
    np.testing.assert_allclose(lookup(adapter, "embed", table, [3, 7, 4]), expected, rtol=1e-6)


def test_what_cannot_be_served_is_refused(base: Path, tmp_path: Path) -> None:
    for index, options in enumerate(
        [
            {"modules_to_save": ["lm_head"]},
            {"bias": "lora_only"},
            {"init_lora_weights": "pissa"},
            {"init_lora_weights": "olora"},
        ]
    ):
        if "gpt2" in base.name and "init_lora_weights" in options:
            continue  # PEFT itself cannot
        with pytest.raises(UnsupportedAdapter):
            trained(base, tmp_path / str(index), target_modules=modules(base)[:1], **options)
