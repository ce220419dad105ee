"""Options of a corpus, recorded in its manifest: reading its files, processing the text, and
dropping documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings, one_of

T = TypeVar("T")
STRUCTURES = ("pairs", "dialogues", "ernie")  # formats of records rather than of files
FORMATS = ("auto", "jsonl", "text", "parquet", "arrow", *STRUCTURES)
DOCUMENTS = ("blank_line", "file", "line")
LANGUAGES = ("en", "zh", "mixed", "de", "es", "fr", "it", "ja", "nl", "pt", "ru", "other")
NEWLINES = ("auto", "space", "break")
_LANGUAGE_TAG = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{1,8})*")  # BCP 47
_NEAR = 0.8  # least similarity of near copies


@dataclass(frozen=True, kw_only=True)
class InputOptions(Settings, option="--"):
    """Settings for reading files as documents."""

    format: Annotated[str, one_of(FORMATS)] = "auto"
    """auto, jsonl, text, parquet, arrow, pairs, dialogues or ernie. auto: each file by its name."""
    text_field: str = "text"
    """Field with the text. Of jsonl, parquet and Arrow rows."""
    id_field: str | None = None
    """Field with the id (id, else the file and the position in it)."""
    title_field: str | None = None
    """Field with a title, which becomes the text's first heading."""
    pair_fields: tuple[str, ...] = ("text_a", "text_b", "label")
    """Fields of a pair. Two names: no label."""
    turns_field: str | None = None
    """Field with the turns of a dialogue (turns, else messages)."""
    languages: tuple[str, ...] = ()
    """Language of the documents, as en or zh-Hant; of pairs, those of the two texts."""
    text_documents: Annotated[str, one_of(DOCUMENTS)] = "blank_line"
    """Where a text file's documents end: blank_line, line or file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = " ".join(self.pair_fields)
        if len(self.pair_fields) not in (2, 3):
            raise UserError(
                f"--pair_fields {given}: give three names, two texts and the label (or two with "
                "--no_label), after OUT and INPUT"
            )
        if len(set(self.pair_fields)) < len(self.pair_fields):
            raise UserError(f"--pair_fields {given}: duplicate field")
        self._check_languages()
        if self.title_field and self.structure != "documents":
            raise UserError(f"--title_field: --format {self.format} has no titles")

    def _check_languages(self) -> None:
        given = " ".join(self.languages)
        if wrong := [name for name in self.languages if not _LANGUAGE_TAG.fullmatch(name)]:
            raise UserError(
                f"--languages {given}: {wrong[0]!r} is not a language tag such as en, zh or zh-Hant"
            )
        wanted = {"documents": 1, "dialogues": 1, "pairs": 2}.get(self.structure, 0)
        if self.languages and len(self.languages) != wanted:
            raise UserError(
                f"--languages {given}: --format {self.format} has {wanted or 'none'}; give "
                + (
                    "two, those of the first and the second texts"
                    if wanted == 2
                    else "one, that of all its texts"
                    if wanted
                    else "no --languages"
                )
            )

    @property
    def structure(self) -> str:
        """Structure of a record: documents, pairs, dialogues or ernie."""
        return self.format if self.format in STRUCTURES else "documents"


@dataclass(frozen=True, kw_only=True)
class TextOptions(Settings, option="--"):
    """Settings for turning text into tokens and annotations."""

    language: Annotated[str, one_of(LANGUAGES)] = "mixed"
    """Language: en, zh, mixed, de, es, fr, it, ja, nl, pt, ru or other."""
    lower: bool = False
    """Lower-case the text; the annotation `capital` keeps the capitals. Of use before a tokenizer
    that keeps them."""
    simplify: bool = False
    """Convert traditional to simplified Chinese."""
    newline: Annotated[str, one_of(NEWLINES)] = "auto"
    """How to read a line end: as a break, as a space, or auto. auto: a break unless lines are
    wrapped."""
    segmenter: str | None = None
    """Your segmenter of Chinese characters: module:function(text) -> words. None: rjieba."""
    lexicon_phrase: tuple[str, ...] = ()
    """A list of phrases, one per line."""
    lexicon_entity: tuple[str, ...] = ()
    """A list of entities, one per line."""
    collocations: bool = True
    """Mine phrases from the text."""
    collocation_count: PositiveInt = 8
    """Minimum count of a pair of words that forms a phrase."""
    collocation_npmi: Annotated[float, Field(ge=-1, le=1)] = 0.35
    """Minimum normalized PMI of such a pair. It is from -1 to 1."""

    @property
    def chinese(self) -> bool:
        """Whether Chinese characters are Chinese words."""
        return self.language in ("zh", "mixed")

    @property
    def capitals_name(self) -> bool:
        """Whether the text has words in letters, of which capitals mark names."""
        return self.language not in ("zh", "ja")


@dataclass(frozen=True, kw_only=True)
class ScreenOptions:
    """Options of the screening; by default nothing is dropped."""

    dedup: str | None = None
    """Drop copies of earlier documents: exact, near (0.8), or a similarity."""
    filters: tuple[str, ...] = ()
    """Drop documents of low quality: gopher, or module:function."""

    def __post_init__(self) -> None:
        try:
            right = 0.5 <= self.similarity <= 1
        except ValueError:
            right = False
        if not right:
            raise UserError(f"--dedup {self.dedup}: must be exact, near, or a number from 0.5 to 1")

    @property
    def active(self) -> bool:
        return self.dedup is not None or bool(self.filters)

    @property
    def near(self) -> bool:
        """Whether near copies are dropped too."""
        return self.dedup not in (None, "exact")

    @property
    def similarity(self) -> float:
        """The least share of common shingles of near copies."""
        return {None: 1.0, "exact": 1.0, "near": _NEAR}.get(self.dedup) or float(str(self.dedup))


def restored(kind: type[T], state: Mapping[str, Any]) -> T:
    """Options of this kind from JSON, with lists as tuples."""
    return kind(**{key: tuple(x) if isinstance(x, list) else x for key, x in state.items()})
