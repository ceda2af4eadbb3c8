"""Open a model's weights, whatever their format. Decided by content, never by suffix alone."""

from __future__ import annotations

from pathlib import Path

from kvarto.core.errors import BadFile
from kvarto.models.base import TensorInfo, WeightFiles
from kvarto.models.gguf import GGUFFiles
from kvarto.models.int4 import open_quantised
from kvarto.models.raw_file import RawFile
from kvarto.models.safetensors import SafetensorsFiles, refuse_pickle

__all__ = ["TensorInfo", "WeightFiles", "model_name", "open_weights"]


def open_weights(path: Path) -> WeightFiles:
    """Headers only; nothing big is read. `path` is a safetensors folder or a GGUF file.

    Raises BadFile for what is neither or lies about itself, UnsupportedModel for what is valid but not built in.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise BadFile(f"`{path}` does not exist; give a model folder, a `.gguf` file, a hub id or `demo`")
    _refuse_others(path)
    return GGUFFiles(path)


def model_name(path: Path) -> str:
    """`org/name` inside a hub's cache, else the last part of the path, without `.gguf`."""
    for part in path.absolute().parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    name = path.absolute().name
    return name.removesuffix(".gguf") or "model"


def _open_folder(folder: Path) -> WeightFiles:
    if (folder / "config.json").is_file():
        return open_quantised(SafetensorsFiles(folder))
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return open_weights(ggufs[0])
    if ggufs:
        raise BadFile(f"`{folder}` has {len(ggufs)} GGUF files; name one of them, such as `{ggufs[0]}`")
    raise BadFile(f"`{folder}` has no `config.json` and no `.gguf` file; give the folder that `save_pretrained` wrote")


def _refuse_others(path: Path) -> None:
    file = RawFile(path)
    try:
        start = file.read(0, min(16, file.size_bytes))
    finally:
        file.close()
    refuse_pickle(path, start)
    if start[:4] != b"GGUF":
        hint = "; give the folder that holds it" if path.suffix == ".safetensors" else ""
        raise BadFile(f"`{path}` is not a GGUF file (it begins with {start[:4]!r}){hint}")
