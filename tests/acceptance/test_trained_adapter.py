"""An adapter that PEFT trained on a small text, in a real server: it says what PEFT says, and the base what it said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kvarto import LLM, SamplingParams
from kvarto.engine.config import EngineConfig
from tests.acceptance.serving import served
from tests.server.tiny_model import LAYERS, write_tiny_model

peft = pytest.importorskip("peft", reason="needs PEFT: the package `peft`, 0.18 or newer")
# After the question whether to skip: these two take seconds.
import torch  # noqa: E402
import transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = "A sheet is folded into equal pages. Pages hold keys and values, or the rows of an adapter. "
PROMPTS = ("folded into equal", "keys and values,", "into equal pages.")
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, NUM_STEPS, WINDOW, BATCH, NUM_TOKENS = 8, 250, 64, 8, 32
LEARNING_RATE = 2e-2
TOLERANCE = 2e-4
"""Of a log-probability: two float32 programs that add in different orders differ by up to 4e-5 here."""
TIE_GAP = 0.02
"""Nothing here may hang on a tie, or another machine would draw another token."""


@dataclass(frozen=True)
class Said:
    """Greedy tokens after a prompt, and their log-probabilities."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Trained:
    """Folders, what the loss was, and what each of the two says by `transformers`."""

    model: Path
    adapters: Path
    losses: list[float]
    by_peft: dict[str, Said]
    by_base: dict[str, Said]


def train(model: Any, tokens: torch.Tensor) -> list[float]:
    """AdamW on windows of the text, in float32. Returns the loss of each step.

    The rate falls to nothing, so that the end is the same text on every machine, whatever its last bits were.
    """
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / NUM_STEPS)
        starts = torch.randint(len(tokens) - WINDOW, (BATCH,))
        batch = torch.stack([tokens[start : start + WINDOW] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def say(model: Any, tokenizer: Any, prompt: str) -> Said:
    """Greedy, by `transformers`."""
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    made = model.generate(
        input_ids=ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    drawn, logits = made.sequences[0, ids.shape[1] :], torch.cat(made.logits)
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > TIE_GAP, "choose another seed, or another prompt"
    logprobs = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
    return Said(tuple(tokenizer.decode([token]) for token in drawn.tolist()), tuple(logprobs.tolist()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    path = write_tiny_model(folder / "tiny")
    torch.manual_seed(3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    by_base = {prompt: say(model, tokenizer, prompt) for prompt in PROMPTS}
    options = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules=MODULES)
    wrapped = peft.get_peft_model(model, options)
    losses = train(wrapped, torch.tensor(tokenizer(TEXT * 4, add_special_tokens=False).input_ids))
    wrapped.save_pretrained(folder / "adapters" / "folded")
    by_peft = {prompt: say(wrapped, tokenizer, prompt) for prompt in PROMPTS}
    return Trained(path, folder / "adapters", losses, by_peft, by_base)


@pytest.fixture(scope="module", params=["native", "reference"])
def http(request: pytest.FixtureRequest, trained: Trained) -> Iterator[httpx.Client]:
    engine = EngineConfig(
        model=str(trained.model), backend=request.param, threads=1, dtype="f32", activations="f32", max_num_seqs=8,
        max_model_len=256, adapter_dir=(str(trained.adapters),), max_lora_rank=RANK,
    )  # fmt: skip
    with served(engine) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def ask(http: httpx.Client, model: str, prompt: str) -> Said:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "logprobs": 1}  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    logprobs = answer.json()["choices"][0]["logprobs"]
    return Said(tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"]))


def assert_said(got: Said, want: Said) -> None:
    assert got.tokens == want.tokens
    far = max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))
    assert far <= TOLERANCE, f"a log-probability is {far:.1e} away"


def test_training_has_taught_the_text(trained: Trained) -> None:
    assert trained.losses[-1] < 0.2 * math.log(259) < trained.losses[0]
    for prompt in PROMPTS:
        _, _, rest = (TEXT * 2).partition(prompt)
        assert "".join(trained.by_peft[prompt].tokens) == rest[:NUM_TOKENS]
        assert trained.by_peft[prompt].tokens != trained.by_base[prompt].tokens


def test_it_is_served_by_name_and_says_what_peft_says(http: httpx.Client, trained: Trained) -> None:
    card = http.get("/v1/models/folded").json()
    assert (card["parent"], card["root"]) == ("tiny", "folded")
    for prompt in PROMPTS:
        assert_said(ask(http, "folded", prompt), trained.by_peft[prompt])
    files = trained.adapters / "folded" / "adapter_model.safetensors"
    card = http.get("/v1/models/folded").json()
    assert (card["rank"], card["tier"]) == (RANK, "device")
    assert 0 < files.stat().st_size - card["size_bytes"] < 10_000 * LAYERS  # the file's header


def test_the_base_says_what_it_said_also_beside_the_adapter(http: httpx.Client, trained: Trained) -> None:
    alone = {prompt: ask(http, "tiny", prompt) for prompt in PROMPTS}
    for prompt in PROMPTS:
        assert_said(alone[prompt], trained.by_base[prompt])
    asked = [(model, prompt) for prompt in PROMPTS for model in ("tiny", "folded")]
    with ThreadPoolExecutor(len(asked)) as threads:
        together = dict(zip(asked, threads.map(lambda each: ask(http, *each), asked), strict=True))
    for prompt in PROMPTS:
        assert together["tiny", prompt] == alone[prompt]
        assert_said(together["folded", prompt], trained.by_peft[prompt])


def logprobs_of_text(trained: Trained, dtype: str) -> NDArray[np.float64]:
    """Of each token of the text but the first, as the adapter has them."""
    with LLM(
        str(trained.model), backend="native", threads=1, dtype="f32", activations="f32", kv_cache_dtype="f32",
        max_num_seqs=2, max_model_len=256, adapter_dir=(str(trained.adapters),), max_lora_rank=RANK,
        adapter_dtype=dtype,
    ) as llm:  # fmt: skip
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([TEXT * 2], sampling, adapter="folded")
    assert output.prompt_logprobs is not None
    return np.array([each.logprob for each in output.prompt_logprobs])


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.1), ("int4", 1.0)])
def test_codes_say_nearly_what_the_file_says(trained: Trained, dtype: str, most: float) -> None:
    """Measured: 0.03 and 0.44 on average, where bfloat16 is 0.01 away and the base 7.4."""
    error = np.abs(logprobs_of_text(trained, dtype) - logprobs_of_text(trained, "auto"))
    assert error.mean() < most
