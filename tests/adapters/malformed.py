"""Ways to break an adapter on disk. Each is given a random generator and a good adapter, and leaves a bad one."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvarto.adapters.peft_keys import KEY_RULES, Stance
from tests.adapters.writer import Written, safetensors_bytes

Break = Callable[[random.Random, Written], None]
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
HUGE = (1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30)
RANK_PATTERNS = ([1], 3, {"q_proj": 0}, {"(": 4}, {"q_proj": 3}, {"(?=a)": 4}, {"": 4})
FLAGS = ("use_rslora", "use_dora", "lora_bias")
JUNK: tuple[Any, ...] = (None, True, -1, 0.5, "text", [], {}, [[1]], {"a": 1}, 1e300, -(10**40))


def _split(written: Written) -> tuple[dict[str, Any], bytes]:
    data = safetensors_bytes(written.tensors)
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _put(written: Written, header: bytes | dict[str, Any], data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (written.folder / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text + data)


def _field(change: Callable[[random.Random, dict[str, Any], int], None]) -> Break:
    """Change the header's entry of one tensor."""

    def broken(rng: random.Random, written: Written) -> None:
        header, data = _split(written)
        change(rng, header[rng.choice(list(written.tensors))], len(data))
        _put(written, header, data)

    return broken


def _text(change: Callable[[random.Random, bytes], bytes]) -> Break:
    """Change the header's text."""

    def broken(rng: random.Random, written: Written) -> None:
        header, data = _split(written)
        _put(written, change(rng, json.dumps(header).encode()), data)

    return broken


def _whole(change: Callable[[random.Random, bytes], bytes], name: str = TENSORS) -> Break:
    """Change the file's bytes."""

    def broken(rng: random.Random, written: Written) -> None:
        path = written.folder / name
        path.write_bytes(change(rng, path.read_bytes()))

    return broken


def _config(change: Callable[[random.Random, dict[str, Any]], object]) -> Break:
    """Change the config's values."""

    def broken(rng: random.Random, written: Written) -> None:
        change(rng, written.config)
        written.save()

    return broken


def _tensors(change: Callable[[random.Random, dict[str, Any], str], object], kind: str = "lora_") -> Break:
    """Change the tensors, and write a sound file of them."""

    def broken(rng: random.Random, written: Written) -> None:
        change(rng, written.tensors, rng.choice([name for name in written.tensors if kind in name]))
        written.save()

    return broken


def _path(change: Callable[[random.Random, Path], object]) -> Break:
    """Put something else in the place of one of the files."""

    def broken(rng: random.Random, written: Written) -> None:
        path = written.folder / rng.choice((TENSORS, CONFIG))
        path.unlink()
        change(rng, path)

    return broken


def _shape_of(values: tuple[Any, ...]) -> Break:
    return _field(lambda r, entry, size: entry.update(shape=[r.choice(values), *entry["shape"][1:]]))


def _rename(new: Callable[[random.Random, str], str]) -> Break:
    def change(rng: random.Random, tensors: dict[str, Any], name: str) -> None:
        tensors[new(rng, name)] = tensors.pop(name)

    return _tensors(change)


def _resized(change: Callable[[random.Random, tuple[int, ...]], tuple[int, ...]], kind: str = "lora_") -> Break:
    def resize(rng: random.Random, tensors: dict[str, Any], name: str) -> None:
        dtype, array = tensors[name]
        tensors[name] = (dtype, np.zeros(change(rng, array.shape), array.dtype))

    return _tensors(resize, kind)


def _refused_keys(rng: random.Random, config: dict[str, Any]) -> None:
    names = [rule.name for rule in KEY_RULES if rule.stance is Stance.REFUSED]
    config[rng.choice(names)] = rng.choice((True, {"x": 1}))


def _shifted(rng: random.Random, entry: dict[str, Any], size_bytes: int) -> None:
    by = rng.choice((4, -4, 8))
    entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def _offset_junk(rng: random.Random, entry: dict[str, Any], size_bytes: int) -> None:
    entry["data_offsets"] = rng.choice(([1], [2, 1], None, [0, 0.5], [-4, 4], "ab", JUNK))


def _number(*values: bytes) -> Break:
    """Another text in the place of the first 4, which is the rank."""
    return _whole(lambda rng, data: data.replace(b": 4", b": " + rng.choice(values), 1), CONFIG)


def _sparse(rng: random.Random, path: Path) -> None:
    path.touch()
    os.truncate(path, (20 << 30) + rng.randrange(1 << 30))


def _socket(rng: random.Random, path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def _many(rng: random.Random, written: Written) -> None:
    header, data = _split(written)
    for index in range(40_000):
        header[f"m{index}.lora_A.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    _put(written, header, data)


def _twice(rng: random.Random, text: bytes) -> bytes:
    return text[:-1] + b"," + text[1:-1] + b"}"


def _wrong_type(key: str, values: tuple[Any, ...]) -> Break:
    return _config(lambda rng, config: config.update({key: rng.choice(values)}))


BREAKS: dict[str, tuple[Break, str]] = {
    # The container.
    "cut short": (_whole(lambda r, d: d[: r.randrange(len(d))]), "bytes|JSON"),
    "longer": (_whole(lambda r, d: d + r.randbytes(r.randint(1, 99))), "follow the last tensor"),
    "header long": (_whole(lambda r, d: struct.pack("<Q", r.choice((1 << 20, 1 << 63))) + d[8:]), "claims"),
    "header one short": (_whole(lambda r, d: struct.pack("<Q", 5 + r.randrange(50)) + d[8:]), "JSON"),
    "pickle": (_whole(lambda r, d: r.choice((b"\x80\x04", b"PK\x03\x04")) + r.randbytes(50)), "pickled"),
    "noise": (_whole(lambda r, d: r.randbytes(200)), "."),
    "header no object": (_text(lambda r, t: r.choice((b"[]", b"3", b'"x"', b"null"))), "an object was expected"),
    "header no UTF-8": (_text(lambda r, t: t[:20] + b"\xff\xfe" + t[22:]), "JSON"),
    "header deep": (_text(lambda r, t: b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}"), "."),
    "header NaN": (_text(lambda r, t: t.replace(b"[0,", b"[NaN,", 1)), "NaN"),
    "header repeats keys": (_text(_twice), "twice"),
    "too many tensors": (_many, "at most"),
    "shape huge": (_shape_of(HUGE), "takes"),
    "shape junk": (_shape_of((-1, 0.5, "8", None, True, [3], -(1 << 70))), "shape"),
    "shape not a list": (_field(lambda r, e, s: e.update(shape=r.choice((None, 3, "x", {})))), "shape"),
    "shape long": (_field(lambda r, e, s: e.update(shape=[1] * r.randint(9, 500))), "extents"),
    "offset shifted": (_field(_shifted), "overlaps|gap|offsets"),
    "offset huge": (_field(lambda r, e, s: e.update(data_offsets=[0, r.choice(HUGE)])), "offsets span"),
    "offset junk": (_field(_offset_junk), "offsets"),
    "dtype unknown": (_field(lambda r, e, s: e.update(dtype=r.choice(("F31", "", None, 3, [])))), "dtype"),
    "dtype of another size": (_field(lambda r, e, s: e.update(dtype=r.choice(("F64", "F16", "U8")))), "takes"),
    "dtype not read": (_field(lambda r, e, s: e.update(dtype=r.choice(("I32", "U32")))), "read are"),
    "field missing": (_field(lambda r, e, s: e.pop(r.choice(list(e)))), "must have"),
    "field added": (_field(lambda r, e, s: e.update(more=1)), "must have"),
    # The config.
    "config cut": (_whole(lambda r, d: d[: r.randrange(len(d))], CONFIG), "JSON"),
    "config no object": (_whole(lambda r, d: r.choice((b"[]", b"1", b'"a"')), CONFIG), "object"),
    "config repeats keys": (_whole(_twice, CONFIG), "twice"),
    "config NaN": (_number(b"NaN", b"Infinity", b"-Infinity"), "not JSON"),
    "config deep": (_whole(lambda r, d: b'{"r":' + b"[" * 50_000 + b"]" * 50_000 + b"}", CONFIG), "."),
    "config digits": (_number(b"9" * 30, b"9" * 4000, b"9" * 9000), "."),
    "config long": (_whole(lambda r, d: d + b" " * (5 << 20), CONFIG), "at most"),
    "r": (_wrong_type("r", (0, -1, 0.5, "8", [4], True, 5, 1 << 70)), "r`|rank"),
    "lora_alpha": (_wrong_type("lora_alpha", ("8", [], True, 1e300, 10**50)), "lora_alpha"),
    "rank_pattern": (_wrong_type("rank_pattern", RANK_PATTERNS), "rank_pattern"),
    "alpha_pattern": (_wrong_type("alpha_pattern", (3, {"q": None}, {"[": 4}, {"a" * 900: 4})), "alpha_pattern"),
    "peft_type": (_wrong_type("peft_type", ("IA3", None, 3, "ADALORA")), "peft_type"),
    "init_lora_weights": (_wrong_type("init_lora_weights", ("pissa", "new", 3)), "init_lora_weights"),
    "bias": (_wrong_type("bias", ("all", "lora_only", 3)), "bias"),
    "flags": (_config(lambda r, c: c.update({r.choice(FLAGS): r.choice((1, "x", [0]))})), "true or false"),
    "promised tensors": (_config(lambda r, c: c.update({r.choice(("use_dora", "lora_bias")): True})), "is true, but"),
    "promised tokens": (_wrong_type("trainable_token_indices", ([1], {"lm_head": [3]}, [1, 1], [-1], "x")), "token"),
    "invocation": (_wrong_type("alora_invocation_tokens", ([], [-1], [97], ["a"], 3)), "invocation"),
    "refused keys": (_config(_refused_keys), "not built in"),
    "unknown keys": (_config(lambda r, c: c.update({f"use_{r.randrange(99)}": r.choice(JUNK)})), "unknown"),
    # The tensors.
    "no A": (_tensors(lambda r, t, name: t.pop(name), "lora_A"), "no A"),
    "no B": (_tensors(lambda r, t, name: t.pop(name), "lora_B"), "no B"),
    "nothing": (_tensors(lambda r, t, name: t.clear()), "change nothing"),
    "wrong rank": (_resized(lambda r, s: (s[0] + r.randint(1, 3), s[1]), "lora_A"), "rank"),
    "rank 0": (_resized(lambda r, s: (0, s[1]), "lora_A"), "rank"),
    "wrong in": (_resized(lambda r, s: (s[0], s[1] + r.choice((-1, 1, 32))), "lora_A"), "features"),
    "wrong out": (_resized(lambda r, s: (s[0] + r.choice((-1, 1, 64)), s[1]), "lora_B"), "features"),
    "transposed": (_resized(lambda r, s: s[::-1]), "transposed|rank"),
    "convolution": (_resized(lambda r, s: (*s, 1, 1)), "two axes"),
    "vector": (_resized(lambda r, s: s[:1]), "two axes"),
    "other module": (_rename(lambda r, n: n.replace("_proj", f"_proj{r.randrange(9)}")), "no module"),
    "other layer": (_rename(lambda r, n: n.replace("layers.", f"layers.{r.randint(2, 99)}")), "no module"),
    "other format": (_rename(lambda r, n: n.replace("lora_A", "lora_up").replace("lora_B", "lora_down")), "kohya"),
    "other ending": (_rename(lambda r, n: n + r.choice((".x", "x", ".y.z"))), "none that|whole"),
    "name long": (_rename(lambda r, n: "a." * r.randint(300, 900) + n), "characters"),
    "name unprintable": (_rename(lambda r, n: n[:5] + r.choice("\0\n\x7f\u202e") + n[5:]), "printable"),
    "second adapter": (_tensors(lambda r, t, n: t.update({n.replace(".weight", ".b.weight"): t[n]})), "are both"),
    "whole weight": (_tensors(lambda r, t, n: t.update({n.partition(".lora")[0] + ".weight": t[n]})), "whole weight"),
    # The files.
    "absent": (_path(lambda r, path: None), "has no"),
    "empty": (_path(lambda r, path: path.touch()), "JSON|bytes"),
    "a folder": (_path(lambda r, path: path.mkdir()), "regular|directory|has no"),
    "a pipe": (_path(lambda r, path: os.mkfifo(path)), "regular"),
    "a socket": (_path(_socket), "cannot be opened|regular"),
    "a device": (_path(lambda r, path: path.symlink_to("/dev/zero")), "outside of"),
    "a link out": (_path(lambda r, path: path.symlink_to(r.choice(("/etc/passwd", "../../..", "/")))), "outside of"),
    "a link to nothing": (_path(lambda r, path: path.symlink_to("nothing")), "has no|cannot"),
    "a link to itself": (_path(lambda r, path: path.symlink_to(path.name)), "has no|cannot"),
    "too large": (_path(_sparse), "at most"),
}  # fmt: skip
"""Each with a piece of the message that it must give."""
