"""YAML in and out: comments and order of a file survive a change, and a key that stands twice is refused."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from kvarto.core.errors import BadFile, UsageError

try:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
except ImportError as error:
    raise UsageError(f"this command needs a YAML library ({error}); `pip install 'kvarto[k8s]'`") from error

_LINE_WIDTH = 1 << 16
"""Long values stay on one line: a folded command line can't be copied."""
MAX_NODES = 200_000
"""Of a document with its aliases written out. A few lines of aliases can stand for more than any machine holds."""


def load_all(text: str, name: str = "the text") -> list[Any]:
    """The documents of a file, without empty ones. Raises BadFile with the line where it goes wrong."""
    try:
        documents = [document for document in _yaml().load_all(text) if document is not None]
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


def _check_finite(documents: list[Any], name: str) -> None:
    """Refuse aliases that hold themselves, or stand for too much; everybody who walks the tree would follow them."""
    num_nodes, stack = 0, list(documents)
    while stack:
        node = stack.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise BadFile(f"`{name}` has aliases that stand for more than {MAX_NODES:,} values, or for themselves")
        if isinstance(node, (dict, list)):
            stack.extend(node.values() if isinstance(node, dict) else node)


def _yaml() -> YAML:
    yaml = YAML(typ="rt", pure=True)
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
