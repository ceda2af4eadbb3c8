"""An opened model says of itself what its files say, and loads without taking memory of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from kvarto.core.dtype import DType
from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models.files import model_name
from kvarto.models.model import open_model

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 77,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens(["<e>", "<f>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<e>"})
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_the_demo(demo_model: Path) -> None:
    model = open_model(demo_model, DType.BF16)
    assert model.name == "SmolLM2-135M-Instruct.Q4_1"
    assert model.eos_token_ids == (2,)
    assert model.max_positions == 8192
    assert model.program.vocab_size == 49152
    assert model.generation_defaults == {}
    assert sum(weight.num_elements for weight in model.program.weights.values()) == 134_515_008
    assert model.chat_template is not None
    text = model.chat_template.render([{"role": "user", "content": "hi"}])
    assert model.tokenizer.encode(text, add_special_tokens=False)[:2] == [1, 9690]
    model.close()


def test_a_folder(folder: Path) -> None:
    model = open_model(folder, DType.F32)
    assert model.max_positions == 77
    assert model.chat_template is None
    assert 2 in model.eos_token_ids  # `<e>`, and the config's own
    model.close()


def test_end_tokens_of_all_sources(folder: Path) -> None:
    write(folder, "generation_config.json", {"eos_token_id": [3, 63, 64, 5_000_000_000, -1]})
    model = open_model(folder, DType.F32)
    assert model.eos_token_ids == (2, 3, 63), "ids beyond the logits cannot end anything"
    model.close()


def test_end_tokens_of_another_type_are_refused(folder: Path) -> None:
    for value in ("2", [1, "2"], 2.0, True, {"a": 1}):
        write(folder, "generation_config.json", {"eos_token_id": value})
        with pytest.raises(BadFile, match="end tokens"):
            open_model(folder, DType.F32)


def test_sampling_defaults(folder: Path) -> None:
    write(
        folder,
        "generation_config.json",
        {"temperature": 0.6, "top_p": 1, "top_k": 20, "do_sample": True, "min_p": None},
    )
    model = open_model(folder, DType.F32)
    assert model.generation_defaults == {"temperature": 0.6, "top_p": 1.0, "top_k": 20}
    assert type(model.generation_defaults["top_k"]) is int
    model.close()
    for key, value in {"temperature": -1, "top_p": 0, "top_k": "7", "min_p": 2, "repetition_penalty": True}.items():
        write(folder, "generation_config.json", {key: value})
        with pytest.raises(BadFile, match=f"`{key}` = "):
            open_model(folder, DType.F32)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "A{{ eos_token }}", "eos_token": "<e>"}}, "A<e>"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "B"}]}}, "B"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        ({"chat_template.jinja": "D", "chat_template.json": {"chat_template": "C"}}, "D"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "B"}]}}, None),
        ({"tokenizer_config.json": {"chat_template": 7}}, None),
        ({"chat_template.jinja": " \n"}, None),
    ],
)
def test_chat_templates_by_place(files: dict[str, Any], expected: str | None, folder: Path) -> None:
    for name, value in files.items():
        write(folder, name, value)
    model = open_model(folder, DType.F32)
    rendered = None if model.chat_template is None else model.chat_template.render([{"role": "user", "content": "x"}])
    assert rendered == expected
    model.close()


def test_refusals_come_before_anything_is_loaded(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadFile, match=r"no `tokenizer\.json`"):
        open_model(folder, DType.F32)
    config = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", config | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    with pytest.raises(UnsupportedModel, match="mamba"):
        open_model(folder, DType.F32)
    write(folder, "config.json", config | {"num_hidden_layers": 2})
    with pytest.raises(BadFile, match="lacks 9 tensors"):
        open_model(folder, DType.F32)
    write(folder, "config.json", '{"model_type": "llama", "model_type": "llama"}')
    with pytest.raises(BadFile, match="twice"):
        open_model(folder, DType.F32)


def test_names() -> None:
    snapshot = "/c/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/0123/"
    assert model_name(Path(snapshot)) == "HuggingFaceTB/SmolLM2-135M"
    assert model_name(Path(snapshot) / "x.gguf") == "HuggingFaceTB/SmolLM2-135M"
    assert model_name(Path("/m/My-Model")) == "My-Model"
    assert model_name(Path("/m/My-Model.Q4_0.gguf")) == "My-Model.Q4_0"


LOADS = """
import ctypes, sys
from pathlib import Path
import numpy as np
from kvarto.core.dtype import DType
from kvarto.models.loader import load_weights
from kvarto.models.model import open_model

def memory(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

model = open_model(Path(sys.argv[1]), DType(sys.argv[2]))
arena = {name: np.zeros(weight.size_bytes, np.uint8) for name, weight in model.program.weights.items()}
for array in arena.values():
    array.fill(1)  # touched, so that the arena is in memory before we measure
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = memory("VmRSS")
class Store:
    def store_weight(self, name, offset, raw):
        arena[name][offset : offset + len(raw)] = raw
load_weights(model.program, model.files, Store())
print(memory("VmHWM") - before)
"""


def test_loading_takes_a_few_blocks_of_memory(demo_model: Path) -> None:
    command = [sys.executable, "-c", LOADS, str(demo_model), "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 32 << 20  # measured: 6 MiB as f32, 8 MiB as bf16


@pytest.mark.heavy
def test_every_weight_of_the_demo_equals_transformers(demo_model: Path) -> None:
    """transformers' own reader of GGUF, tensor by tensor, bit for bit."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype="float32"
    ).state_dict()
    model = open_model(demo_model, DType.F32)
    for name, info in model.files.tensors.items():
        ours = model.files.read_rows(name, 0, info.num_rows).reshape(info.shape)
        assert np.array_equal(ours, theirs.pop(name).numpy()), name
    assert set(theirs) <= {"lm_head.weight"}
    model.close()
