"""Text processing options of a corpus, recorded in its manifest."""

from __future__ import annotations

from dataclasses import dataclass

from palm_ds.common.errors import UserError, suggest

LANGUAGES = ("en", "zh", "mixed")
NEWLINES = ("auto", "space", "break")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How text becomes tokens and annotations."""

    language: str = "mixed"  # en: no Chinese words; zh: no English phrases or names; mixed: both
    lower: bool = False  # lower-case before a tokenizer that keeps capitals
    simplify: bool = False  # traditional to simplified Chinese
    newline: str = (
        "auto"  # a single line end: auto (a break unless lines are wrapped), space, break
    )
    segmenter: str | None = None  # module:function for Chinese words; None: rjieba
    lexicon_phrase: tuple[str, ...] = ()  # files, one phrase a line
    lexicon_entity: tuple[str, ...] = ()  # files, one entity a line
    collocations: bool = True  # mine phrases from the corpus
    collocation_count: int = 8  # least number of occurrences
    collocation_npmi: float = 0.35  # least normalized pointwise mutual information, -1 to 1

    def __post_init__(self) -> None:
        for key, value, known in (
            ("language", self.language, LANGUAGES),
            ("newline", self.newline, NEWLINES),
        ):
            if value not in known:
                raise UserError(f"--{key} {value!r}: unknown{suggest(value, known)}")
        if self.collocation_count < 1:
            raise UserError(f"--collocation_count {self.collocation_count}: must be at least 1")
        if not -1 <= self.collocation_npmi <= 1:
            raise UserError(f"--collocation_npmi {self.collocation_npmi}: must be from -1 to 1")
