"""Tokenizers of a user's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import palm_ds as palm

Spans = Sequence[tuple[str, int, int]]


class Pieces(palm.CustomTokenizer):
    """Words cut into pieces of some characters, in lower case; a file lists words kept whole."""

    def __init__(self, folder: Path, longest: int = 2):
        super().__init__(folder)
        self.longest = longest
        file = folder / "whole.txt"
        self.whole = file.read_text().split() if file.exists() else []

    def tokenize(self, text: str) -> Spans:
        found = []
        for match in re.finditer(r"\S+", text):
            size = len(match[0]) if match[0] in self.whole else self.longest
            for start in range(*match.span(), size):
                end = min(start + size, match.end())
                found.append((text[start:end].lower(), start, end))
        return found

    def join(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def save(self, folder: Path) -> None:
        (folder / "whole.txt").write_text("\n".join(self.whole))

    @property
    def fingerprint(self) -> str:
        return " ".join(self.whole)


class Outside(palm.CustomTokenizer):
    def tokenize(self, text: str) -> Spans:
        return [(text, 0, len(text) + 1)]


class Growing(palm.CustomTokenizer):
    calls = 0

    def tokenize(self, text: str) -> Spans:
        self.calls += 1
        return [(f"{self.calls}", 0, len(text))]


class Broken(palm.CustomTokenizer):
    def tokenize(self, text: str) -> Spans:
        return [(text[0], 0, 1)]


class Unpicklable(palm.CustomTokenizer):
    def __init__(self, folder: Path):
        super().__init__(folder)
        self.lower = lambda text: text.lower()

    def tokenize(self, text: str) -> Spans:
        return [(self.lower(text), 0, len(text))]
