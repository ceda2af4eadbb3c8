"""Trainable tokens: embedding rows that an adapter replaces. The file has the rows, only the config has their ids.

The tensors are called deltas, but PEFT puts them in the place of the base's rows. In a tied model the output matrix
follows its embedding, and the file has the rows once.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvarto.adapters.adapter import TokenRows
from kvarto.adapters.arrays import StoredArray
from kvarto.adapters.targets import LM_HEAD, BaseTargets, Role
from kvarto.core.errors import AdapterMismatch, BadAdapter, UnsupportedAdapter

DEFAULT_MODULE = "embed_tokens"
"""What a plain list of ids is about, whatever the base calls its embedding."""


def token_rows(
    rows: Mapping[str, StoredArray], ids: Mapping[str, tuple[int, ...]], base: BaseTargets
) -> tuple[TokenRows, ...]:
    """`rows` by module path, `ids` by its end. Raises an AdapterError where one is without the other."""
    ids_of = {_module_of(name, base): tokens for name, tokens in ids.items() if tokens}
    found = []
    for module, array in rows.items():
        tokens = ids_of.pop(_module_of(module, base), None)
        if tokens is None:
            raise BadAdapter(
                f"tensor `{array.name}` replaces tokens, but `trainable_token_indices` has none for `{module}`; "
                "put the config of this very adapter beside its tensors"
            )
        found.append(_rows(module, array, tokens, base))
    _check_rest(ids_of, found, base)
    if len(found) == 2:  # each matrix has rows of its own
        found = [TokenRows(f.weight, f.roles[:1], f.token_ids, f.rows) for f in found]
    return tuple(sorted(found, key=lambda f: f.roles))


def _module_of(name: str, base: BaseTargets) -> str:
    """The full path that a name of the config, or of the file, ends."""
    if name == DEFAULT_MODULE or f".{base.embed_module}".endswith(f".{name}"):
        return base.embed_module
    return LM_HEAD if name.rpartition(".")[2] == LM_HEAD else name


def _rows(module: str, array: StoredArray, tokens: tuple[int, ...], base: BaseTargets) -> TokenRows:
    target = base.find(_module_of(module, base))
    if target.role is Role.LINEAR:
        raise UnsupportedAdapter(f"tensor `{array.name}` replaces rows of `{module}`, which is no embedding")
    hidden = target.out_width if target.role is Role.EMBED else target.in_width
    if array.shape != (len(tokens), hidden):
        raise AdapterMismatch(
            f"tensor `{array.name}` has shape {list(array.shape)}; {len(tokens)} tokens of the base take "
            f"[{len(tokens)}, {hidden}]"
        )
    if max(tokens) >= base.vocab_size:
        raise AdapterMismatch(
            f"`trainable_token_indices` has token {max(tokens)}; the base has {base.vocab_size} tokens, from 0 on: "
            "the vocabulary was enlarged for training, which is not built in"
        )
    is_shared = base.is_tied and target.role is Role.EMBED
    return TokenRows(target.weight, (Role.EMBED, Role.LOGITS) if is_shared else (target.role,), tokens, array)


def _check_rest(ids_of: Mapping[str, tuple[int, ...]], found: list[TokenRows], base: BaseTargets) -> None:
    """Ids without rows are fine for the matrix that follows its tied embedding, if they are the same ids."""
    for module, tokens in ids_of.items():
        if module == LM_HEAD and base.is_tied and any(f.token_ids == tokens for f in found):
            continue
        raise BadAdapter(
            f"`trainable_token_indices` names {len(tokens)} tokens of `{module}`, but the file has no rows for them; "
            "save the adapter again"
        )
