"""Tokenizers of the user's own: a class that splits a text into tokens of a vocabulary.

    my_tokenizer/vocab.txt                one token a line, special tokens among them
    my_tokenizer/tokenizer_config.json    {"custom_tokenizer": {"kind": "my_module.Syllables",
                                                                "options": {"longest": 4}}}

Such a folder is given where any tokenizer is, and is saved with a model as any other. (A
tokenizer.json in place of vocab.txt works too: its vocabulary and special tokens are read.) Other
programs know only the vocabulary: they need texts split already, the tokens joined by spaces.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from palm_ds.common import files
from palm_ds.common.config import check_keys
from palm_ds.common.errors import UserError, named_line
from palm_ds.common.plugins import check_options, import_class

KEY = "custom_tokenizer"
_PROBES = ("A b, \u00e9\u4e00\U0001f600  aaaa!", "", " ", "[MASK]")


class CustomTokenizer(ABC):
    """Splits texts into tokens. The constructor gets the folder of the vocabulary, and the options
    in its tokenizer_config.json. Objects must be picklable: processes that prepare a corpus get
    copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def tokenize(self, text: str) -> Sequence[tuple[str, int, int]]:
        """The tokens of a text, each with its characters [start, end), in the order of the text.
        Tokens that the vocabulary lacks, and special ones, become [UNK]. It must follow from the
        text alone."""

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens, for display and generated texts."""
        return " ".join(tokens)

    def save(self, folder: Path) -> None:
        """Writes the files that the constructor reads, besides the vocabulary, into another folder.
        Here: none."""
        _ = folder

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever files or options change the tokens of a text; options and
        vocabulary need not be in it."""
        return ""


@dataclass(frozen=True, kw_only=True)
class TextSplitter:
    """A user's tokenizer with the name and the options it was made by."""

    kind: str
    options: Mapping[str, Any]
    made: CustomTokenizer
    where: str
    """The folder, for messages."""

    @property
    def fingerprint(self) -> str:
        """A hash of what determines the tokens of a text, apart from the code of the class."""
        return files.fingerprint([self.kind, dict(self.options), self.made.fingerprint])

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes the files of the class; returns the entry of tokenizer_config.json."""
        self.made.save(folder)
        return {KEY: {"kind": self.kind, "options": dict(self.options)}}

    def split(self, text: str) -> tuple[list[str], np.ndarray]:
        """Tokens, and (tokens, 2) int64 the characters [start, end) of each. Raises UserError for
        spans that are not in the text, or not in its order."""
        try:
            found = list(self.made.tokenize(text))
            tokens = [str(token) for token, _, _ in found]
            spans = np.array([span for _, *span in found], np.int64).reshape(-1, 2)
        except Exception as error:  # user code may raise anything
            raise UserError(
                f"{self.where}: {self.kind}: fails on {text[:40]!r}: {named_line(error)}"
            ) from error
        bounds = np.column_stack([spans, np.full(len(spans), len(text))])
        if (np.diff(bounds) < 0).any() or (spans < 0).any() or (np.diff(spans[:, 0]) < 0).any():
            raise UserError(
                f"{self.where}: {self.kind}: {text[:40]!r} has spans {spans[:8].tolist()}; "
                f"expected [start, end) within its {len(text)} characters, in order"
            )
        return tokens, spans


def find_splitter(folder: Path, entry: object) -> TextSplitter | None:
    """The class that the entry KEY of tokenizer_config.json names; None without an entry. Raises
    UserError if there is no such class, or it fails a trial."""
    if entry is None:
        return None
    where = f"tokenizer {folder}: {KEY}"
    named = check_keys(entry, ("kind", "options"), where)
    kind, options = str(named.get("kind", "")), named.get("options") or {}
    cls: type[Any] = import_class(kind, CustomTokenizer, where)
    check_options(cls, options, f"{where}.options", base=CustomTokenizer, reserved=())
    failed = "cannot be made"
    try:
        made = cls(folder, **options)
        failed = "cannot be pickled, as other processes need"
        copied = pickle.loads(pickle.dumps(made))
    except Exception as error:  # user code may raise anything
        raise UserError(f"{where}: {kind}: {failed}: {named_line(error)}") from error
    splitter = TextSplitter(kind=kind, options=options, made=made, where=where)
    again = TextSplitter(kind=kind, options=options, made=copied, where=where)
    first = [splitter.split(text) for text in _PROBES]
    for (tokens, _), text in reversed(list(zip(first, _PROBES, strict=True))):
        if again.split(text)[0] != tokens:
            raise UserError(
                f"{where}: {kind}: splits {text!r} into other tokens when it is asked in another "
                "order, or after pickling; they must follow from the text alone"
            )
    return splitter


def compile_vocabulary(tokens: Sequence[str], *, unknown: str, special: Sequence[str]) -> Backend:
    """A backend that looks up tokens joined by spaces."""
    backend = Backend(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="", cleanup=False)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return backend


def normalized(text: str, normalizer: normalizers.Normalizer | None) -> str:
    """A text simplified or lower-cased by a normalizer, as far as a character stays one."""
    if normalizer is None:
        return text
    whole = normalizer.normalize_str(text)
    if len(whole) == len(text):
        return whole
    each = [(old, normalizer.normalize_str(old)) for old in text]
    return "".join(new if len(new) == 1 else old for old, new in each)
