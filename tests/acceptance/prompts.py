"""Varied prompts: prose, code, lists, several scripts, numbers, chat turns, one word and several hundred."""

from __future__ import annotations

import random

_OPENINGS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village between two rivers,",
    "Q: What is the boiling point of water at sea level?\nA:",
    "import numpy as np\n\nclass Pool:\n    def __init__(self, num_pages):\n",
    "Ingredients:\n- 200 g flour\n- 3 eggs\n-",
    "1, 1, 2, 3, 5, 8, 13,",
    "Il était une fois une petite fille qui",
    "Die wichtigste Eigenschaft eines Betriebssystems ist",
    "El sol sale por el este y",
    "人工知能とは、",
    "Привет! Как",
    "SELECT name, count(*) FROM adapters WHERE",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are: first,",
)
_WORDS = (
    "memory page table cache river model adapter stone winter budget seven light engine blue tokens number city "
    "north theory garden write read copy free hold evict plan serve train small large fast slow answer question"
).split()


def varied_prompts(count: int, seed: int) -> list[str]:
    """`count` different prompts of about 3 to 400 tokens, the same for the same seed."""
    rng = random.Random(seed)
    prompts = []
    for index in range(count):
        opening = _OPENINGS[index % len(_OPENINGS)]
        if index < len(_OPENINGS):
            prompts.append(opening)
            continue
        filler = " ".join(rng.choice(_WORDS) for _ in range(rng.choice((5, 20, 60, 150, 300))))
        prompts.append(f"{filler}.\n\n{opening}")
    return prompts
