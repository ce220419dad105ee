"""The English documentation inside CPython: a small corpus that needs no download.

The language reference (`pydoc_data.topics`, one document per topic) and the docstrings of the
standard library, parsed from its source files (one document per module). About 2 MB.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_WITHOUT_PROSE = {
    "__pycache__",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "turtledemo",
}
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of a statement that hold other statements, in the order of ast.walk."""
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documents() -> Iterator[tuple[str, str]]:
    """(id, text) of every document, in a fixed order."""
    yield from _topics()
    yield from _modules()


@lru_cache(maxsize=1)
def all_documents() -> tuple[tuple[str, str], ...]:
    """`documents()`, cached: parsing the standard library takes seconds."""
    return tuple(documents())


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        if text := inspect.cleandoc(topics[name]).strip():
            yield f"topic/{name}", text


def _modules() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if _WITHOUT_PROSE.isdisjoint(parts) and (text := _docstrings(file)):
            yield "module/" + ".".join(parts).removesuffix(".__init__"), text


def _docstrings(file: Path) -> str:
    """The docstrings of a module in source order, separated by blank lines."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""  # not valid for this interpreter
    nodes = [node for node in _statements(tree) if isinstance(node, _WITH_DOCSTRING)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return "\n\n".join(text.strip() for text in texts if text.strip())


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """As ast.walk, without the expressions: most of the nodes, and none has a docstring."""
    level: list[ast.AST] = [tree]
    while level:
        yield from level
        level = [child for node in level for name in _BLOCKS for child in getattr(node, name, ())]
