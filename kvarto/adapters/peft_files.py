"""Open a folder that PEFT wrote: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvarto.adapters.arrays import LazyArray
from kvarto.adapters.assemble import IsCopy, NamedTensor, assemble
from kvarto.adapters.files import AdapterLimits, PinnedFile, adapter_errors, confined, pin
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.peft_config import parse_peft_config
from kvarto.adapters.targets import BaseTargets
from kvarto.adapters.tensor_names import parse_tensor_name
from kvarto.core.dtype import DType
from kvarto.core.errors import BadAdapter, UnsupportedAdapter
from kvarto.models.json_file import parse_json
from kvarto.models.safetensors import TensorEntry, read_header

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_DTYPES = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}


def open_peft_adapter(
    folder: Path,
    base: BaseTargets,
    roots: Sequence[Path],
    *,
    limits: AdapterLimits | None = None,
    is_strict: bool = True,
    is_copy: IsCopy | None = None,
) -> OpenedAdapter:
    """Read and check all but the values. Folder and files lie inside one of `roots`, links followed.

    Raises BadAdapter, UnsupportedAdapter or AdapterMismatch. `is_copy` compares saved embeddings with the base's;
    without it they are refused.
    """
    limits = limits or AdapterLimits()
    inside = confined(folder, roots)
    with adapter_errors():
        _refuse_absence(inside)
    config_file = pin(inside / CONFIG_NAME, roots, limits.max_config_bytes)
    tensors_file = pin(inside / TENSORS_NAME, roots, limits.max_file_bytes)
    with adapter_errors():
        values = parse_json(config_file.read(0, config_file.identity.size_bytes), str(config_file.path))
        config = parse_peft_config(values, is_strict=is_strict)
        with tensors_file.opened() as file:
            entries = read_header(file, limits.max_header_bytes, limits.max_tensors)
        tensors = [_named(entry, tensors_file) for entry in entries]
        adapter = assemble(tensors, config, base, max_rank=limits.max_rank, is_copy=is_copy)
    return OpenedAdapter(adapter, (config_file, tensors_file))


def _refuse_absence(folder: Path) -> None:
    if not folder.is_dir():
        raise BadAdapter(f"`{folder}` is not a folder; give the one that PEFT's `save_pretrained` wrote")
    has_tensors = (folder / TENSORS_NAME).is_file()
    pickled = next((name for name in _PICKLES if (folder / name).is_file()), None)
    if pickled and not has_tensors:
        raise UnsupportedAdapter(
            f"`{folder}` has only `{pickled}`, which is pickled and never read, as it can run code; "
            "load it with PEFT and save it again, which writes safetensors"
        )
    if (folder / "adapters.safetensors").is_file() and not has_tensors:
        raise UnsupportedAdapter(f"`{folder}` is an adapter of MLX, which is not built in; convert it to PEFT's format")
    for name in (CONFIG_NAME, TENSORS_NAME):
        if not (folder / name).exists():
            raise BadAdapter(
                f"`{folder}` has no `{name}`; give the folder that PEFT's `save_pretrained` wrote, or its sub-folder "
                "with the adapter's name"
            )


def _named(entry: TensorEntry, file: PinnedFile) -> NamedTensor:
    info = entry.info
    name = parse_tensor_name(info.name)
    if info.file_dtype not in _DTYPES:
        raise UnsupportedAdapter(f"tensor `{info.name}` is {info.file_dtype}; read are {', '.join(_DTYPES)}")

    def load_part(start: int, num_bytes: int) -> bytes:
        return file.read(entry.offset + start, num_bytes)

    load = partial(load_part, 0, info.file_bytes)
    return name, LazyArray(info.name, info.shape, _DTYPES[info.file_dtype], load, load_part)
