"""The prose of Python files: docstrings, comments, messages and names."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, messages and other strings, comments, and names as words."""
    nodes = list(ast.walk(ast.parse(source)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_shown(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in parts:
                yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name.replace("_", " ")
    yield from _comments(source)


def _shown(part: ast.expr) -> str:
    """A part of an f-string: its text, or braces for a value."""
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments; those on consecutive lines are one text."""
    first, last, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        number = token.start[0]
        if number != last + 1:
            yield first, text
            first, text = number, ""
        last, text = number, f"{text} {token.string.lstrip('# ')}"
    yield first, text
