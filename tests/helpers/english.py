"""Finds words that read like a literal translation, in pages and in the prose of Python files."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

# Literal translations from German and Latin, each with what an engineer would write. They are easy
# to understand one by one; a page of them is not.
FOREIGN = {
    "goes on|going on|go on from": "continues, resumes",
    "begun|begins? anew|anew|(?:begins?|starts?) afresh": "started, newly initialised",
    "of one's own|ones own|of somebody's own": "your own, user-defined, custom",
    "stands there|stands in|stand in": "is, appears; to stand in for: replace",
    "is due|are due|was due|as it is due": "is expected",
    "knowing nothing": "the baseline",
    "theirs|of theirs": "name what it belongs to",
    "left behind|stays? behind|stayed behind|beside": "skipped; is next to",
    "is said|was said|said of|said otherwise|what of": "name who does it, or: is given by, set by",
    "told": "is called, is distinguished",
    "a person|somebodys|whoever|who calls": "the user, the caller, you; or the passive",
    "what came of|what became of|came whole": "the result of",
    "in its place": "instead",
    "(?:go|goes|went|come|comes) along": "is kept, is copied",
    "never mind": "ignore, leave out",
    "at once": "together, at the same time, immediately",
    "so many": "a number: N, that many",
    "parts a word": "splits a word",
    "is left alone": "stays unchanged",
    "it is there already|is there already": "already exists",
    "is none of (?:them|theirs|these)": "is not one of",
}
_PATTERNS = {
    re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE): better
    for words, better in FOREIGN.items()
}


def foreign_words(text: str, allowed: Iterable[str] = ()) -> list[str]:
    """Each word of FOREIGN in the text outside `allowed`, with what to write. A line break does not
    hide one."""
    flat = " ".join(text.split())
    for each in allowed:
        flat = flat.replace(each, "")
    hits = [(hit, better) for each, better in _PATTERNS.items() for hit in each.finditer(flat)]
    return [f"{hit[0]!r}; write: {better}" for hit, better in hits]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph of a page."""
    number = 1
    for part in re.split(r"(\n\s*\n)", text):
        yield number, part
        number += part.count("\n")


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
