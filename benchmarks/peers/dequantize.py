"""A GGUF file as a Hugging Face folder: `python -m benchmarks.peers.dequantize FILE FOLDER {f32,bf16}`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def dequantize(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the folder whole or not at all."""
    reading = {"gguf_file": source.name, "dtype": torch.float32}
    read = transformers.AutoModelForCausalLM.from_pretrained(source.parent, **reading)
    config = read.config
    del config.quantization_config  # it says that the weights are GGUF's, which refuses to be saved
    config.dtype = dtype
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(dtype)
    model.load_state_dict(read.state_dict())
    part = target.with_suffix(".part")
    model.save_pretrained(part)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(part)
    part.rename(target)


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]), DTYPES[sys.argv[3]])
