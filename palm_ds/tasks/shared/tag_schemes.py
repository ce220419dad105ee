"""Tags and the labels a head has for them: which scheme a table is written in, which tags a scheme
may write, which may follow which, and spans of characters as chunks of words.

What a scheme is and how tags are read: palm_ds/tasks/metrics/chunks.py. `none` is for tags that are
no chunks at all, such as parts of speech.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.chunks import Chunk, check_scheme, scheme_named, split_tag
from palm_ds.tasks.metrics.counts import Counts

NONE = "none"
_LETTERS = {"IO": "I", "BIO": "BI", "IOB1": "BI", "IOE1": "IE", "IOE2": "IE", "BIOES": "BIES"}
_TRIED = ("BIO", "IOB1", "BIOES", "IOE2", "IOE1", "IO")
_CONTINUED = {"BIOES": "BI", "IOE2": "I"}  # after these, the same chunk goes on
_CONTINUES = {"BIOES": "IE", "BIO": "I"}  # before these, the same chunk has begun


def named(scheme: str) -> str:
    """One of the schemes, or `none`. Raises UserError."""
    return NONE if scheme == NONE else scheme_named(scheme)


def of_chunks(rows: Iterable[Sequence[str]]) -> bool:
    """Whether these are tags of chunks: B-PER and the like stand among them, or nothing but O and
    letters."""
    every = {tag for tags in rows for tag in tags}
    like = (len(tag) > 2 and tag[0] in "BIES" and tag[1] == "-" for tag in every)
    return any(like) or every <= set("OBIES")


def found_scheme(rows: Sequence[Sequence[str]]) -> str:
    """The first of BIO, IOB1, BIOES, IOE2, IOE1 and IO that all rows keep to. Where none is: the
    one whose letters they have."""
    letters = {split_tag(tag)[0] for tag in {tag for tags in rows for tag in tags}}
    for scheme in _TRIED:
        if letters <= set(_LETTERS[scheme] + "O") and keeps(rows, scheme):
            return scheme
    if "E" in letters or "S" in letters:
        return "BIOES" if letters & {"B", "S"} else "IOE2"
    return "BIO" if "B" in letters else "IO"


def keeps(rows: Iterable[Sequence[str]], scheme: str) -> bool:
    """Whether all rows are written as the scheme writes."""
    return all(check_scheme(tags, scheme) is None for tags in rows)


def check_tags(tags: Sequence[str], scheme: str) -> None:
    """Raises UserError where one is no tag, or none that the scheme (if it is known) ever writes.
    Their order is none of its business: tags are read by conlleval's rules."""
    for number, tag in enumerate(tags, 1):
        try:
            letter, _ = split_tag(tag)
        except UserError as error:
            raise UserError(f"tag {number}: {error}") from None
        if scheme and letter not in _LETTERS[scheme] + "O":
            forms = ", ".join([f"{x}-TYPE" for x in _LETTERS[scheme]])
            raise UserError(f'tag {number}: "{tag}" is none of {scheme}, which has {forms} and O')


def labels_of(types: Iterable[str], scheme: str) -> tuple[str, ...]:
    """Every tag of these types: type by type, O last (Paddle's order)."""
    letters = _LETTERS[scheme]
    return (
        *(f"{x}-{kind}" if kind else x for kind in sorted(types) for x in letters),
        "O",
    )


def allowed(labels: Sequence[str], scheme: str) -> np.ndarray:
    """(labels + 2, labels) bool: row 0, which may begin a sentence; row 1, which may end it; the
    others, which may follow the label of that row. All is as `scheme` writes."""
    tags = [split_tag(label) for label in labels]
    outside = ("O", "")
    rows = [[_follows(outside, tag, scheme) for tag in tags]]
    rows += [[_follows(tag, outside, scheme) for tag in tags]]
    rows += [[_follows(before, tag, scheme) for tag in tags] for before in tags]
    return np.array(rows, bool)


def _follows(before: tuple[str, str], after: tuple[str, str], scheme: str) -> bool:
    """Whether a tag may stand right after another (outside of a sentence is as O)."""
    (a, a_type), (b, b_type) = before, after
    same = a_type == b_type and "O" not in (a, b)
    if scheme == "IOB1":
        return b != "B" or same
    if scheme == "IOE1":
        return a != "E" or same
    goes_on = a in _CONTINUED.get(scheme, "")
    went_on = b in _CONTINUES.get(scheme, "")
    if scheme == "BIO":
        return same or not went_on
    if scheme == "IOE2":
        return same or not goes_on
    return scheme == "IO" or (same if goes_on and went_on else not goes_on and not went_on)


# ---- spans of characters ----


def chunks_of_spans(
    spans: Sequence[Mapping[str, Any]], places: np.ndarray
) -> tuple[list[Chunk], int, int]:
    """Spans {start, end, type} as chunks of the words at `places` (words, 2); how many are left
    out, as they overlap a longer one (or as long, and earlier in the list) or hold no word; and how
    many are widened, since they begin or end within a word, or narrowed by white space."""
    taken: list[Chunk] = []
    moved = 0
    for span in sorted(spans, key=lambda span: span["start"] - span["end"]):
        first = int(np.searchsorted(places[:, 1], span["start"], "right"))
        last = int(np.searchsorted(places[:, 0], span["end"], "left"))
        if first >= last or any(first < each.end and each.start < last for each in taken):
            continue
        taken.append(Chunk(first, last, span["type"]))
        moved += (int(places[first, 0]), int(places[last - 1, 1])) != (span["start"], span["end"])
    return sorted(taken), len(spans) - len(taken), moved


def spans_of_chunks(found: Iterable[Chunk], places: np.ndarray) -> list[dict[str, Any]]:
    """Chunks of words as spans of characters."""
    return [
        {
            "start": int(places[chunk.start, 0]),
            "end": int(places[chunk.end - 1, 1]),
            "type": chunk.type,
        }
        for chunk in found
    ]


def span_counts(
    pairs: Iterable[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]],
) -> dict[str, Counts]:
    """{type: counts} of predicted spans beside those that there are, text by text."""
    types: dict[str, Counts] = {}
    for texts in pairs:
        found, there = (
            {(span["type"], span["start"], span["end"]) for span in spans} for spans in texts
        )
        for span in found | there:
            counts = Counts(span in found & there, span in found, span in there)
            types[span[0]] = types.get(span[0], Counts()) + counts
    return dict(sorted(types.items()))
