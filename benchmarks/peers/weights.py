"""The demo model in other formats: GGUF by llama.cpp's own converter, dequantised folders for who reads safetensors.

All come from the published Q4_1 file, so every format holds the same model or a coarser copy of it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.peers.engines.llama_cpp import LlamaCpp
from benchmarks.peers.folders import OUR_PYTHON, Folders

GGUF_FORMATS = ("q4_0", "q8_0", "f16", "bf16", "f32")
FOLDER_DTYPES = ("f32", "bf16")


def make_gguf_files(folders: Folders) -> None:
    """What is missing, by `llama-quantize`."""
    folders.models.mkdir(parents=True, exist_ok=True)
    for weights in GGUF_FORMATS:
        path = folders.weights_path(weights)
        if not path.exists():
            part = path.with_suffix(".part")
            LlamaCpp().quantize(folders, folders.gguf, part, weights)
            part.rename(path)


def make_folders(folders: Folders) -> None:
    """What is missing, by `transformers`, in a process of its own: it takes gigabytes."""
    for dtype in FOLDER_DTYPES:
        path = folders.folder_path(dtype)
        if not path.exists():
            subprocess.run([OUR_PYTHON, "-m", "benchmarks.peers.dequantize", folders.gguf, path, dtype], check=True)


def fetch_demo(path: Path) -> None:
    """The published file, where `kvarto` keeps it."""
    if not path.exists():
        subprocess.run([OUR_PYTHON, "-m", "kvarto", "pull", "demo"], check=True)
