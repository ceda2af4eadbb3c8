"""From what a person types to a local path: a folder, a GGUF file, a hub id, or `demo`.

Hub ids go through `huggingface_hub`, whose cache and environment variables apply (`HF_HOME`, `HF_TOKEN`,
`HF_HUB_OFFLINE`, `HF_ENDPOINT`); a connection that breaks is taken up where it broke, complete files are kept, and
only files that we read are fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from kvarto.core.errors import UsageError
from kvarto.models.demo import Say, pull_demo

DEMO = "demo"
FOLDER_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "model.safetensors", "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)  # fmt: skip
"""All that is read of a folder. Copies in other formats, often as large again, stay where they are."""

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([A-Za-z0-9][\w.-]{0,31}))?")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def resolve(model: str, say: Say = print) -> Path:
    """A local path to serve from; fetches what is missing. Raises UsageError that says what would work."""
    path = Path(model).expanduser()
    if not model or model == DEMO or not path.exists():  # an empty path would be the current folder
        return pull(model, say)
    return path


def pull(model: str, say: Say = print) -> Path:
    """Fetch `demo` or a hub id, as far as it is not here already. `say` gets a line per step; bars go to stderr."""
    if model == DEMO:
        return pull_demo(say)
    match = _HUB_ID.fullmatch(model)
    if match is None or model.endswith(".gguf"):
        raise UsageError(
            f"there is no folder or file `{model:.200}`; give a model folder, a `.gguf` file, a hub id such as "
            "`HuggingFaceTB/SmolLM2-135M-Instruct` or `org/name:Q4_K_M`, or `demo`"
        )
    return _pull(match[1], match[2], say)


def _pull(repo: str, quant: str | None, say: Say) -> Path:
    import huggingface_hub  # with its HTTP client, as long to import as all else of a start: only for who fetches

    with _explaining(repo):
        names = _list_files(repo)
        if quant is None and "config.json" in names and any(name.endswith(".safetensors") for name in names):
            say(f"Fetching {repo}")
            return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(FOLDER_FILES)))
        name = choose_gguf(repo, [name for name in names if name.endswith(".gguf") and "mmproj" not in name], quant)
        say(f"Fetching {repo}/{name}")
        return Path(huggingface_hub.hf_hub_download(repo, name))


@contextmanager
def _explaining(repo: str) -> Iterator[None]:
    """Turn what the package raises into a UsageError that says what would work."""
    from huggingface_hub import errors as hub_errors

    try:
        yield
    except UsageError:
        raise
    except hub_errors.GatedRepoError as error:
        raise UsageError(
            f"`{repo}` asks for consent first: accept its terms at its page while logged in, then set `HF_TOKEN`"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"the hub has no model `{repo}` that you may read; check the spelling, or set `HF_TOKEN` if it is private"
        ) from error
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled) as error:
        raise UsageError(
            f"`{repo}` is not in the local cache and the hub cannot be reached; connect (and unset `HF_HUB_OFFLINE`), "
            "or give a local folder or `.gguf` file"
        ) from error
    except Exception as error:  # whichever HTTP client the package uses, its errors are its own
        raise UsageError(
            f"fetching `{repo}` failed: {error!s:.300}; run it again, files that are complete are kept"
        ) from error


def _list_files(repo: str) -> list[str]:
    """Names in the repository, or, where the hub cannot be reached, in the local cache."""
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    try:
        # One request without the patience of the listing calls: who is offline should not wait half a minute.
        return [file.rfilename for file in huggingface_hub.HfApi().model_info(repo).siblings or ()]
    except hub_errors.RepositoryNotFoundError:
        raise
    except Exception as error:
        folder = _cached_snapshot(repo)
        if folder is None:
            raise hub_errors.LocalEntryNotFoundError(f"{repo}: {error}") from error
        return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def _cached_snapshot(repo: str) -> Path | None:
    import huggingface_hub

    cache = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    try:
        revision = (cache / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = cache / "snapshots" / revision
    return folder if folder.is_dir() else None


def choose_gguf(repo: str, names: Sequence[str], quant: str | None) -> str:
    """The one file of that quantisation. Raises UsageError listing what there is."""
    whole = [name for name in names if not _PART.search(name)]
    found = [name for name in whole if quant is None or _is_quant(name, quant)]
    if len(found) == 1:
        return found[0]
    quants = ", ".join(f"`{repo}:{label}`" for label in dict.fromkeys(map(_quant_of, whole)) if label)
    if not names:
        raise UsageError(f"`{repo}` has neither `config.json` with safetensors nor a GGUF file; nothing else is read")
    if not whole:
        raise UsageError(f"the GGUF files of `{repo}` come in parts; join them with `llama-gguf-split --merge` first")
    if not found:
        raise UsageError(f"`{repo}` has no whole GGUF file of `{quant}`; there are {quants}")
    raise UsageError(f"`{repo}` has {len(found)} GGUF files that fit; name one: {quants}")


def _is_quant(name: str, quant: str) -> bool:
    stem = PurePosixPath(name).stem
    return re.search(rf"(?:^|[-._]){re.escape(quant)}$", stem, re.IGNORECASE) is not None


def _quant_of(name: str) -> str:
    """The label at the end of a file's name: `Q4_K_M`, `IQ4_XS`, `bf16`."""
    match = re.search(r"(?:^|[-.])((?:UD-)?I?Q\d\w*|BF16|F16|F32)$", PurePosixPath(name).stem, re.IGNORECASE)
    return match[1] if match else ""
