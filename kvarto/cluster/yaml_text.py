"""YAML in and out: comments and order of a file survive a change, and a key that stands twice is refused.

Words are read as Kubernetes reads them: its YAML is of version 1.1, where `yes` and `on` are truth values, and its
numbers are those of 1.2. So a text such as "on" is written in quotes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

from kvarto.cluster.tree import TruthWord
from kvarto.core.errors import BadFile, UsageError

try:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import RoundTripConstructor
    from ruamel.yaml.error import ReusedAnchorWarning, YAMLError
    from ruamel.yaml.nodes import ScalarNode
    from ruamel.yaml.representer import RoundTripRepresenter
    from ruamel.yaml.resolver import VersionedResolver
except ImportError as error:
    raise UsageError(f"this command needs a YAML library ({error}); `pip install 'kvarto[k8s]'`") from error

_LINE_WIDTH = 1 << 16
"""Long values stay on one line: a folded command line can't be copied."""
MAX_NODES = 200_000
"""Of a document with its aliases written out. A few lines of aliases can stand for more than any machine holds."""
MAX_DEPTH = 100
"""Of values inside values. Enough for any custom resource's schema, and no walk of the tree runs out of stack."""


def load_all(text: str, name: str = "the text") -> list[Any]:
    """The documents of a file, without empty ones. Raises BadFile with the line where it goes wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)  # an anchor may be set anew
            documents = [document for document in _yaml().load_all(text) if document is not None]
    except RecursionError as error:
        raise BadFile(_too_deep(name)) from error
    except YAMLError as error:
        raise BadFile(f"`{name}` is not valid YAML: {_one_line(error)}") from error
    except ValueError as error:  # a timestamp that is none, and the like
        raise BadFile(f"`{name}` is not valid YAML: {error}") from error
    _check_finite(documents, name)
    return documents


def dump(document: Any) -> str:
    """One document. Keys stand in the order of the mapping."""
    return dump_all([document])


def dump_all(documents: Sequence[Any], *, like: str = "") -> str:
    """Documents with `---` between them. `like` is text whose habits to follow: a `---` at the start, dashes set in."""
    yaml, stream = _yaml(), io.StringIO()
    yaml.explicit_start = like.startswith("---") or None
    offset = _dash_offset(like)
    yaml.indent(mapping=2, sequence=2 + offset, offset=offset)
    yaml.dump_all(documents, stream)
    return stream.getvalue()


def rewrite(text: str, before: Sequence[Any], after: Sequence[Any]) -> str:
    """The text with those documents written anew that differ. All else stays as it is, such as a licence in a document
    of its own, which holds nothing but comments.
    """
    pieces = re.split(r"^(?=---(?:\s|$))", text, flags=re.MULTILINE)
    full = [index for index, piece in enumerate(pieces) if _has_content(piece)]
    if len(full) != len(after):
        return dump_all(after, like=text)
    for index, old, new in zip(full, before, after, strict=True):
        if dump(old) != dump(new):
            pieces[index] = dump_all([new], like=pieces[index])
    return "".join(pieces)


def _has_content(piece: str) -> bool:
    """Whether more stands in it than comments, directives and markers of documents."""
    lines = (line.strip() for line in piece.removeprefix("---").splitlines())
    return any(line and line != "..." and line[0] not in "#%" for line in lines)


def _check_finite(documents: list[Any], name: str) -> None:
    """Refuse aliases that hold themselves, or stand for too much; everybody who walks the tree would follow them."""
    num_nodes = 0
    stack = [(document, 0) for document in documents]
    while stack:
        node, depth = stack.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise BadFile(f"`{name}` has aliases that stand for more than {MAX_NODES:,} values, or for themselves")
        if isinstance(node, (dict, list)):
            if depth == MAX_DEPTH:
                raise BadFile(_too_deep(name))
            stack.extend((value, depth + 1) for value in (node.values() if isinstance(node, dict) else node))


def _too_deep(name: str) -> str:
    return f"`{name}` has values inside each other, more than {MAX_DEPTH} deep, or an alias that stands for itself"


_TRUTH = re.compile("[yY]|[nN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")


class _Resolver(VersionedResolver):
    """What a plain word means, when it is read and when it is written."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """The tag of a value; `implicit` tells of a scalar whether it stands there without quotes."""
        is_truth = kind is ScalarNode and implicit[0] and _TRUTH.fullmatch(value)
        return super().resolve(kind, "true" if is_truth else value, implicit)


class _Constructor(RoundTripConstructor):
    """Keeps a truth value's word."""

    def construct_truth(self, node: Any) -> Any:
        """Of a node that was resolved to one."""
        is_word = isinstance(node.value, str) and _TRUTH.fullmatch(node.value)
        return TruthWord(node.value) if is_word else self.construct_yaml_bool(node)


class _Representer(RoundTripRepresenter):
    """Writes it as it was."""

    def represent_truth(self, word: TruthWord) -> Any:
        """The word without quotes."""
        return self.represent_scalar(_TRUTH_TAG, str(word))


_TRUTH_TAG = "tag:yaml.org,2002:bool"
_Constructor.add_constructor(_TRUTH_TAG, _Constructor.construct_truth)
_Representer.add_representer(TruthWord, _Representer.represent_truth)


def _yaml() -> YAML:
    yaml = YAML(typ="rt", pure=True)
    yaml.Resolver, yaml.Constructor, yaml.Representer = _Resolver, _Constructor, _Representer
    yaml.width = _LINE_WIDTH
    yaml.preserve_quotes = True
    return yaml


def _dash_offset(text: str) -> int:
    """How far dashes stand to the right of the key above them, in the first list of a text."""
    match = re.search(r"^( *)[^\s#-][^\n]*:[ \t]*\n( *)- ", text, re.MULTILINE)
    return max(0, len(match[2]) - len(match[1])) if match else 0


def _one_line(error: YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"{problem:.200}" if mark is None else f"line {mark.line + 1}: {problem:.200}"
