"""The sentence under each field of a settings class: written once, in the class, and shown by `--help`.

Python drops such docstrings, so they are read from the class's source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def field_help(settings: type) -> dict[str, str]:
    """Field name → its docstring, in one line. Raises ValueError naming a field that has none."""
    body = _class_body(settings)
    texts = {
        field.target.id: " ".join(inspect.cleandoc(after.value.value).split())
        for field, after in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }
    for name in settings.__annotations__:
        if name not in texts:
            raise ValueError(f"`{settings.__name__}.{name}` has no docstring to show as help")
    return texts


def _class_body(settings: type) -> list[ast.stmt]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
    assert isinstance(definition, ast.ClassDef), "settings are a class"
    return definition.body
