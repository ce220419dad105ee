"""Tagging schemes of tables and heads: detecting the scheme of a table, the tags of a scheme and
their valid transitions, and mapping character spans to chunks of words.

palm_ds/tasks/metrics/chunks.py defines the schemes and how tags are read. The scheme `none` is for
tags that are not chunks, such as parts of speech.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.chunks import Chunk, as_tag, check_scheme, scheme_named, split_tag
from palm_ds.tasks.metrics.counts import MatchCounts

NONE = "none"
_OTHER_NOTATION = re.compile(r"[BIESLUbieslu][-_:.].*|.+[-_:.][BIESLU]")
_LETTERS = {"IO": "I", "BIO": "BI", "IOB1": "BI", "IOE1": "IE", "IOE2": "IE", "BIOES": "BIES"}
_TRIED = ("BIO", "IOB1", "BIOES", "IOE2", "IOE1", "IO")
_OPEN = {"BIOES": "BI", "IOE2": "I"}  # the chunk continues after these letters
_CONTINUING = {"BIOES": "IE", "BIO": "I"}  # these letters continue a chunk


def named(scheme: str) -> str:
    """The scheme with this name or alias, or `none`. Raises UserError for an unknown name."""
    return NONE if scheme == NONE else scheme_named(scheme)


def of_chunks(rows: Iterable[Sequence[str]]) -> bool:
    """Whether these are tags of chunks: some have the form B-PER, or all are single letters of
    OBIES."""
    distinct = {tag for tags in rows for tag in tags}
    typed = (len(tag) > 2 and tag[0] in "BIES" and tag[1] == "-" for tag in distinct)
    return any(typed) or distinct <= set("OBIES")


def in_other_notation(rows: Iterable[Sequence[str]]) -> str:
    """A tag that seems to be a chunk tag in another notation than B-PER, such as B_PER, b-per,
    PER-B or U-PER; empty if there is none."""
    distinct = {tag for tags in rows for tag in tags}
    if not distinct & {"O", "o"}:
        return ""
    return next((tag for tag in sorted(distinct) if _OTHER_NOTATION.fullmatch(tag)), "")


def found_scheme(rows: Sequence[Sequence[str]]) -> str:
    """The first of BIO, IOB1, BIOES, IOE2, IOE1 and IO that all rows follow. If they follow none,
    the one that fits their letters best."""
    letters = {split_tag(tag)[0] for tag in {tag for tags in rows for tag in tags}}
    for scheme in _TRIED:
        if letters <= set(_LETTERS[scheme] + "O") and follows_scheme(rows, scheme):
            return scheme
    if "E" in letters or "S" in letters:
        return "BIOES" if letters & {"B", "S"} else "IOE2"
    return "BIO" if "B" in letters else "IO"


def follows_scheme(rows: Iterable[Sequence[str]], scheme: str) -> bool:
    """Whether all rows are valid in the scheme."""
    return all(check_scheme(tags, scheme) is None for tags in rows)


def check_tags(tags: Sequence[str], scheme: str) -> None:
    """Raises UserError if one is not a tag, or not a tag of the scheme (any scheme if empty). Their
    order is not checked: tags are read by conlleval's rules."""
    for number, tag in enumerate(tags, 1):
        try:
            letter, _ = split_tag(tag)
        except UserError as error:
            raise UserError(f"tag {number}: {error}") from None
        if scheme and letter not in _LETTERS[scheme] + "O":
            forms = ", ".join([f"{x}-TYPE" for x in _LETTERS[scheme]])
            raise UserError(
                f'tag {number}: "{tag}" is not a tag of {scheme}; its tags are {forms} and O'
            )


def labels_of(types: Iterable[str], scheme: str) -> tuple[str, ...]:
    """All tags of these types, grouped by type, O last (Paddle's order)."""
    letters = _LETTERS[scheme]
    return (
        *(as_tag(letter, kind) for kind in sorted(types) for letter in letters),
        "O",
    )


def allowed(labels: Sequence[str], scheme: str) -> np.ndarray:
    """(labels + 2, labels) bool: the transitions that `scheme` allows.

    Row 0: tags that may start a sentence; row 1: tags that may end it; row 2 + i: tags that may
    follow label i."""
    tags = [split_tag(label) for label in labels]
    outside = ("O", "")
    rows = [[_follows(outside, tag, scheme) for tag in tags]]
    rows += [[_follows(tag, outside, scheme) for tag in tags]]
    rows += [[_follows(before, tag, scheme) for tag in tags] for before in tags]
    return np.array(rows, bool)


def _follows(before: tuple[str, str], after: tuple[str, str], scheme: str) -> bool:
    """Whether a tag may directly follow another; the ends of a sentence count as O."""
    (a, a_type), (b, b_type) = before, after
    same = a_type == b_type and "O" not in (a, b)
    if scheme == "IOB1":
        return b != "B" or same
    if scheme == "IOE1":
        return a != "E" or same
    is_open = a in _OPEN.get(scheme, "")
    continues = b in _CONTINUING.get(scheme, "")
    if scheme == "BIO":
        return same or not continues
    if scheme == "IOE2":
        return same or not is_open
    return scheme == "IO" or (same if is_open and continues else not is_open and not continues)


# ---- spans of characters ----


def chunks_of_spans(
    spans: Sequence[Mapping[str, Any]], places: np.ndarray
) -> tuple[list[Chunk], int, int]:
    """Maps character spans {start, end, type} to chunks of the words at `places` (words, 2).

    Returns the chunks, the number of spans left out, and the number of spans whose ends moved. A
    span is left out if it overlaps a longer one (or one of the same length earlier in the list) or
    contains no word. Ends move to word boundaries if they are inside a word or in white space."""
    taken: list[Chunk] = []
    moved = 0
    for span in sorted(spans, key=lambda span: span["start"] - span["end"]):
        first = int(np.searchsorted(places[:, 1], span["start"], "right"))
        last = int(np.searchsorted(places[:, 0], span["end"], "left"))
        if first >= last or any(first < chunk.end and chunk.start < last for chunk in taken):
            continue
        taken.append(Chunk(first, last, span["type"]))
        moved += (int(places[first, 0]), int(places[last - 1, 1])) != (span["start"], span["end"])
    return sorted(taken), len(spans) - len(taken), moved


def spans_of_chunks(chunks: Iterable[Chunk], places: np.ndarray) -> list[dict[str, Any]]:
    """Maps chunks of words to character spans."""
    return [
        {
            "start": int(places[chunk.start, 0]),
            "end": int(places[chunk.end - 1, 1]),
            "type": chunk.type,
        }
        for chunk in chunks
    ]


def span_counts(
    pairs: Iterable[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]],
) -> dict[str, MatchCounts]:
    """{type: counts} of (predicted, expected) spans of all texts."""
    types: dict[str, MatchCounts] = {}
    for texts in pairs:
        predicted, expected = (
            {(span["type"], span["start"], span["end"]) for span in spans} for spans in texts
        )
        for span in predicted | expected:
            counts = MatchCounts(span in predicted & expected, span in predicted, span in expected)
            types[span[0]] = types.get(span[0], MatchCounts()) + counts
    return dict(sorted(types.items()))
