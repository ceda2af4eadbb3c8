"""Adapters over the matrix of PEFT's options, drawn from a seed: what each is trained with, and a prompt for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCAB_SIZE = 97
NUM_LAYERS = 2
BASES = ("llama", "qwen2")


@dataclass
class Case:
    """One adapter."""

    index: int
    feature: str
    rng: random.Random
    base: str
    options: dict[str, Any]
    """Of `LoraConfig`."""
    dtypes: tuple[str, str] = ("float32", "float32")
    """In which A, and everything else, is saved."""
    prompt: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Names what fails."""
        return f"{self.base}-{self.feature}-{self.index}"

    @property
    def start(self) -> int:
        """The position from which it is active on its prompt."""
        tokens = self.options.get("alora_invocation_tokens")
        if not tokens:
            return 0
        places = range(len(self.prompt) - len(tokens), -1, -1)
        return next((p for p in places if self.prompt[p : p + len(tokens)] == tokens), len(self.prompt))


def _rank_pattern(case: Case) -> None:
    # In the order in which PEFT sorts them when it saves: another would load with other ranks than were trained.
    case.options["rank_pattern"] = {r".*\.1\..*_proj": case.rng.choice((2, 11)), "o_proj": case.rng.randint(1, 9)}


def _alpha_pattern(case: Case) -> None:
    case.options["alpha_pattern"] = {"down_proj": 3, "q_proj|k_proj": case.rng.choice((1, 20))}


def _layers(case: Case) -> None:
    case.options["layers_to_transform"] = [case.rng.randrange(NUM_LAYERS)]


def _modules(case: Case) -> None:
    case.options["target_modules"] = case.rng.sample(LINEARS, case.rng.randint(1, 3))


def _tables(*names: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.options["target_modules"] = [*case.rng.sample(LINEARS, case.rng.randint(0, 2)), *names]

    return change


def _dtypes(*dtypes: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.dtypes = dtypes[0], dtypes[-1]

    return change


def _set(**options: Any) -> Callable[[Case], None]:
    return lambda case: case.options.update(options)


def _alora(case: Case) -> None:
    tokens = [case.rng.randrange(VOCAB_SIZE) for _ in range(case.rng.randint(1, 3))]
    case.options["alora_invocation_tokens"] = tokens
    for _ in range(case.rng.randint(0, 2)):  # none: the bare base
        place = case.rng.randrange(len(case.prompt) - len(tokens))
        case.prompt[place : place + len(tokens)] = tokens


def _tokens(case: Case) -> None:
    ids = dict.fromkeys([*case.rng.sample(case.prompt, 4), VOCAB_SIZE - 1])
    case.options["trainable_token_indices"] = {"embed_tokens": list(ids)}


FEATURES: dict[str, tuple[Callable[[Case], None], ...]] = {
    "plain": (),
    "rslora": (_set(use_rslora=True),),
    "rank pattern": (_rank_pattern,),
    "alpha pattern": (_alpha_pattern,),
    "both patterns, rslora": (_rank_pattern, _alpha_pattern, _set(use_rslora=True)),
    "lora bias": (_set(lora_bias=True),),
    "one layer": (_layers,),
    "some modules": (_modules,),
    "lm_head": (_tables("lm_head"),),
    "embedding": (_tables("embed_tokens"),),
    "embedding and lm_head": (_tables("embed_tokens", "lm_head"),),
    "float16": (_dtypes("float16"),),
    "bfloat16": (_dtypes("bfloat16"),),
    "mixed types": (_dtypes("bfloat16", "float32"), _modules),
    "dora": (_set(use_dora=True),),
    "dora, bfloat16, one layer": (_set(use_dora=True), _dtypes("bfloat16"), _layers),
    "dora, rslora, patterns": (_set(use_dora=True, use_rslora=True), _rank_pattern, _alpha_pattern),
    "dora, embedding and lm_head": (_set(use_dora=True), _tables("embed_tokens", "lm_head")),
    "alora": (_alora,),
    "tokens": (_tokens, _modules),
    "tokens, dora, float16": (_tokens, _set(use_dora=True), _dtypes("float16")),
}
ROUNDS = 5


def drawn_case(index: int, feature: str) -> Case:
    """A function of both."""
    rng = random.Random(f"{index} {feature}")
    options = {
        "r": rng.choice((1, 2, 3, 5, 8, 16)), "lora_alpha": rng.choice((1, 4, 7.5, 16)),
        "target_modules": list(LINEARS),
    }  # fmt: skip
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(9, 30))]
    case = Case(index, feature, rng, BASES[index % len(BASES)], options, prompt=prompt)
    for change in FEATURES[feature]:
        change(case)
    return case


CASES = [
    drawn_case(turn * len(FEATURES) + place, feature)
    for turn in range(ROUNDS)
    for place, feature in enumerate(FEATURES)
]
"""105 of them."""
