"""Open a folder that PEFT wrote: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.arrays import Encoding, StoredArray
from kvarto.adapters.assemble import NamedTensor, assemble
from kvarto.adapters.base_copies import IsCopy, refuse_other_weights
from kvarto.adapters.files import (
    AdapterLimits,
    PinnedFile,
    adapter_errors,
    confined,
    opened_inside,
    still_confined,
)
from kvarto.adapters.opened import KnownAdapter, OpenedAdapter, unknown
from kvarto.adapters.peft_config import parse_peft_config
from kvarto.adapters.shape_cache import shape_key
from kvarto.adapters.targets import BaseTargets
from kvarto.adapters.tensor_names import parse_tensor_name
from kvarto.core.errors import BadAdapter, BadFile, UnsupportedAdapter
from kvarto.models.json_file import parse_json
from kvarto.models.raw_file import RawFile
from kvarto.models.safetensors import TensorEntry, header_bytes, parse_header

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_ENCODINGS = {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}
_Opened = tuple[RawFile, PinnedFile]


def open_peft_adapter(
    folder: Path,
    base: BaseTargets,
    roots: Sequence[Path],
    *,
    limits: AdapterLimits | None = None,
    is_strict: bool = True,
    is_copy: IsCopy | None = None,
    known: KnownAdapter = unknown,
) -> OpenedAdapter:
    """Read and check all but the values. Folder and files lie inside one of `roots`, links followed.

    Raises BadAdapter, UnsupportedAdapter or AdapterMismatch. `is_copy` compares saved embeddings with the base's;
    without it they are refused. `known` gives what config and header of equal bytes were found to be, for the same base
    and limits; copies are compared all the same.
    """
    limits = limits or AdapterLimits()
    inside = confined(folder, roots)
    with adapter_errors(), _both_files(inside, roots, limits) as ((config_file, config_pin), (file, file_pin)):
        config = config_file.read(0, config_file.size_bytes)
        header = header_bytes(file, limits.max_header_bytes)
        key = shape_key(config, header, file.size_bytes)
        adapter = known(key)
        if adapter is None:
            adapter = _described(config_file, config, file, header, base, limits, is_strict=is_strict)
        refuse_other_weights(adapter.copies, file, is_copy)
    still_confined(folder, inside)
    return OpenedAdapter(adapter, (config_pin, file_pin), key)


@contextmanager
def _both_files(folder: Path, roots: Sequence[Path], limits: AdapterLimits) -> Iterator[tuple[_Opened, _Opened]]:
    """Config and tensors. What is wrong with a folder is looked at where one cannot be opened."""
    with ExitStack() as stack:
        try:
            config = stack.enter_context(opened_inside(folder, CONFIG_NAME, roots, limits.max_config_bytes))
            tensors = stack.enter_context(opened_inside(folder, TENSORS_NAME, roots, limits.max_file_bytes))
        except (BadAdapter, BadFile, OSError):
            _refuse_absence(folder)
            raise
        yield config, tensors


def _described(
    config_file: RawFile,
    config: bytes,
    file: RawFile,
    header: bytes,
    base: BaseTargets,
    limits: AdapterLimits,
    *,
    is_strict: bool,
) -> Adapter:
    """What config and header say; the files are for messages."""
    parsed = parse_peft_config(parse_json(config, str(config_file.path)), is_strict=is_strict)
    tensors = [_named(entry) for entry in parse_header(file, header, limits.max_tensors)]
    return assemble(tensors, parsed, base, max_rank=limits.max_rank)


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


def _named(entry: TensorEntry) -> NamedTensor:
    info = entry.info
    name = parse_tensor_name(info.name)
    if info.file_dtype not in _ENCODINGS:
        raise UnsupportedAdapter(f"tensor `{info.name}` is {info.file_dtype}; read are {', '.join(_ENCODINGS)}")
    return name, StoredArray(info.name, info.shape, _ENCODINGS[info.file_dtype], entry.offset)
