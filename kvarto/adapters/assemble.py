"""From named tensors and a config to an Adapter, with every contradiction refused: between A and B, tensors and
config, and the adapter and its base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvarto.adapters.adapter import Adapter, BaseCopy, LowRankUpdate
from kvarto.adapters.arrays import StoredArray
from kvarto.adapters.peft_config import AdapterConfig, shown
from kvarto.adapters.targets import BaseTargets, Role, Target
from kvarto.adapters.tensor_names import TensorKind, TensorName
from kvarto.adapters.token_rows import token_rows
from kvarto.core.errors import AdapterMismatch, BadAdapter, UnsupportedAdapter

MAX_SHOWN = 4

NamedTensor = tuple[TensorName, StoredArray]

_A_KINDS = (TensorKind.LORA_A, TensorKind.EMBEDDING_A)
_B_KINDS = (TensorKind.LORA_B, TensorKind.EMBEDDING_B)


@dataclass(slots=True)
class _Module:
    """All tensors of one module."""

    name: str
    trained_name: str
    tensors: dict[TensorKind, StoredArray]

    def first(self, kinds: Iterable[TensorKind]) -> StoredArray | None:
        """The tensor of one of these kinds."""
        return next((self.tensors[kind] for kind in kinds if kind in self.tensors), None)


def assemble(
    tensors: Sequence[NamedTensor],
    config: AdapterConfig,
    base: BaseTargets,
    *,
    max_rank: int,
) -> Adapter:
    """Raises BadAdapter, UnsupportedAdapter or AdapterMismatch. Reads no values: copies of the base come unchecked."""
    modules = _by_module(tensors)
    _refuse_strangers(modules, base)
    copies = tuple(copy for module in modules if (copy := _taken_copy(module)) is not None)
    updates = [_update(module, config, base, max_rank) for module in modules if _has_update(module)]
    updates.sort(key=lambda update: base.order_of(update.target))
    _refuse_overlaps(updates)
    rows = {m.name: m.tensors[TensorKind.TOKEN_ROWS] for m in modules if TensorKind.TOKEN_ROWS in m.tensors}
    replaced = token_rows(rows, config.token_ids, base)
    if not updates and not replaced:
        raise BadAdapter(f"no tensor of the adapter updates `{base.architecture}`; it would change nothing")
    _check_tying(updates, config, base)
    _check_invocation(config, base)
    warnings = (*config.warnings, *_missing_modules(config, modules), *_fused_guesses(modules, base))
    return Adapter(tuple(updates), replaced, config.invocation_tokens, warnings, copies)


def _by_module(tensors: Sequence[NamedTensor]) -> list[_Module]:
    modules: dict[str, _Module] = {}
    for name, array in tensors:
        module = modules.setdefault(name.module, _Module(name.module, name.trained_module, {}))
        if name.kind in module.tensors:
            raise BadAdapter(
                f"tensors `{module.tensors[name.kind].name}` and `{array.name}` are both {name.kind} of "
                f"`{name.module}`; save one adapter per file"
            )
        module.tensors[name.kind] = array
    return list(modules.values())


def _refuse_strangers(modules: Sequence[_Module], base: BaseTargets) -> None:
    """Modules that the base has not, all in one message."""
    errors = []
    for module in modules:
        try:
            base.find(module.name)
        except (AdapterMismatch, UnsupportedAdapter) as error:
            errors.append(error)
    if errors:
        others = f" ({len(errors)} of {len(modules)} modules of the adapter have no place)" if len(errors) > 1 else ""
        raise type(errors[0])(f"{errors[0]}{others}")


def _taken_copy(module: _Module) -> BaseCopy | None:
    array = module.tensors.pop(TensorKind.BASE_COPY, None)
    return None if array is None else BaseCopy(module.name, array)


def _has_update(module: _Module) -> bool:
    return any(kind is not TensorKind.TOKEN_ROWS for kind in module.tensors)


def _update(module: _Module, config: AdapterConfig, base: BaseTargets, max_rank: int) -> LowRankUpdate:
    target = base.find(module.name)
    lora_a, lora_b = module.first(_A_KINDS), module.first(_B_KINDS)
    if lora_a is None or lora_b is None:
        there = " and ".join(array.name for array in (lora_a, lora_b, *module.tensors.values()) if array is not None)
        missing = "B" if lora_a is not None else "A" if lora_b is not None else "A and B"
        raise BadAdapter(f"module `{module.name}` has `{there:.200}` but no {missing}; save the adapter again")
    _check_kinds(module, target)
    rank = _rank(module, lora_a, lora_b, target)
    if not 1 <= rank <= max_rank:
        why = "sharded training saved without gathering" if rank == 0 else "raise the limit, or reduce it by SVD"
        raise BadAdapter(f"module `{module.name}` has rank {rank}; 1 to {max_rank} are served ({why})")
    wanted = config.rank_of(module.trained_name)
    if wanted is not None and wanted != rank:
        raise BadAdapter(
            f"module `{module.name}`: the tensors have rank {rank}, `r` and `rank_pattern` say {wanted}, and the "
            "scaling depends on it; put the config of this very adapter beside its tensors"
        )
    bias = _vector(module, TensorKind.BIAS, target, "lora_bias", is_wanted=config.has_biases)
    magnitude = _vector(module, TensorKind.MAGNITUDE, target, "use_dora", is_wanted=config.has_magnitudes)
    scaling = config.scaling_of(module.trained_name, rank)
    return LowRankUpdate(target, rank, scaling, lora_a, lora_b, bias, magnitude)


def _check_kinds(module: _Module, target: Target) -> None:
    """A table is updated by lora_embedding_A and _B, a matrix by lora_A and lora_B, and nothing by both."""
    is_table = target.role is Role.EMBED
    wanted = (TensorKind.EMBEDDING_A, TensorKind.EMBEDDING_B) if is_table else (TensorKind.LORA_A, TensorKind.LORA_B)
    for kind in (*_A_KINDS, *_B_KINDS):
        if kind in module.tensors and kind not in wanted:
            what = "an embedding table" if is_table else "a matrix"
            raise BadAdapter(f"tensor `{module.tensors[kind].name}` is {kind}, but `{module.name}` is {what}")


def _rank(module: _Module, lora_a: StoredArray, lora_b: StoredArray, target: Target) -> int:
    for array in (lora_a, lora_b):
        if len(array.shape) != 2:
            raise UnsupportedAdapter(
                f"tensor `{array.name}` has shape {list(array.shape)}; matrices of two axes are read (convolutions and "
                "stacked experts are not built in)"
            )
    if lora_a.shape[0] != lora_b.shape[1]:
        raise BadAdapter(
            f"module `{module.name}`: A {list(lora_a.shape)} has rank {lora_a.shape[0]}, B {list(lora_b.shape)} has "
            f"{lora_b.shape[1]}; the tensors are of two adapters, or lie transposed"
        )
    if (lora_a.shape[1], lora_b.shape[0]) != (target.in_width, target.out_width):
        raise AdapterMismatch(
            f"module `{module.name}`: the adapter goes from {lora_a.shape[1]} to {lora_b.shape[0]} features, the base "
            f"from {target.in_width} to {target.out_width}; A of [rank, {target.in_width}] and B of "
            f"[{target.out_width}, rank] fit: serve the base that it was trained on"
        )
    return lora_a.shape[0]


def _vector(module: _Module, kind: TensorKind, target: Target, key: str, *, is_wanted: bool) -> StoredArray | None:
    array = module.tensors.get(kind)
    if array is not None and not is_wanted:
        raise BadAdapter(f"tensor `{array.name}` is there, but `{key}` is not true in the config; one of them is wrong")
    if array is None:
        # An embedding has no bias, and of older versions no magnitude.
        if is_wanted and target.role is not Role.EMBED:
            raise BadAdapter(f"`{key}` is true, but module `{module.name}` has no {kind}; save the adapter again")
        return None
    if math.prod(array.shape) != target.out_width or max(array.shape, default=0) != target.out_width:
        raise AdapterMismatch(
            f"tensor `{array.name}` has shape {list(array.shape)}; [{target.out_width}] fits the base"
        )
    return array.reshaped((target.out_width,))


def _refuse_overlaps(updates: Sequence[LowRankUpdate]) -> None:
    for before, after in pairwise(updates):
        one, two = before.target, after.target
        if (one.weight, one.role) == (two.weight, two.role) and two.first_row < one.first_row + one.out_width:
            raise BadAdapter(
                f"tensors `{before.lora_a.name}` and `{after.lora_a.name}` update the same rows of the base; "
                "one module may be named once, fused or in parts"
            )


def _check_tying(updates: Sequence[LowRankUpdate], config: AdapterConfig, base: BaseTargets) -> None:
    roles = {update.target.role for update in updates}
    if config.is_tying_ensured and base.is_tied and Role.EMBED in roles and Role.LOGITS not in roles:
        raise UnsupportedAdapter(
            "`ensure_weight_tying` is true and the embeddings are updated, but there are no tensors for `lm_head`, "
            "and deriving them is not built in; save the adapter with both"
        )


def _check_invocation(config: AdapterConfig, base: BaseTargets) -> None:
    largest = max(config.invocation_tokens, default=0)
    if largest >= base.vocab_size:
        raise AdapterMismatch(
            f"`alora_invocation_tokens` has token {largest}; the base has {base.vocab_size} tokens, from 0 on"
        )


def _missing_modules(config: AdapterConfig, modules: Sequence[_Module]) -> Iterable[str]:
    names = {module.trained_name for module in modules}
    ends = {name[at:] for name in names for at in (0, *(i + 1 for i, char in enumerate(name) if char == "."))}
    missing = [name for name in config.target_modules if name not in ends]
    if missing:
        some = ", ".join(shown(name) for name in missing[:MAX_SHOWN]) + (", …" if len(missing) > MAX_SHOWN else "")
        yield f"`target_modules` names {some}, for which there are no tensors; those modules stay as they are"


def _fused_guesses(modules: Sequence[_Module], base: BaseTargets) -> Iterable[str]:
    guessed: Mapping[str, None] = {
        name: None
        for module in modules
        if (name := module.name.rpartition(".")[2]) == "query_key_value" and base.find(module.name).role is Role.LINEAR
    }
    for name in guessed:
        yield f"rows of `{name}` are taken as all of q, then k, then v; some models interleave them by head"
