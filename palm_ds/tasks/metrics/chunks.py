"""Chunks in tag sequences: the schemes, their conversion, and F1 by conlleval's rules.

    IO      I-PER I-PER O      neighbours of one type run together
    BIO     B-PER I-PER O      (IOB2, IOB) every chunk begins with B
    IOB1    I-PER I-PER O      B only where a chunk follows one of its own type
    IOE2    I-PER E-PER O      (IOE) every chunk ends with E
    IOE1    I-PER I-PER O      E only where a chunk of its own type follows
    BIOES   B-PER E-PER O      (IOBES) and S for a chunk of one token

All are read by one set of rules, so reading needs no scheme, and a sequence that breaks its
scheme is read all the same: these are conlleval's (E. Tjong Kim Sang, CoNLL-2000), which knows
B, I, E and O, together with what Paddle's `chunk_eval` and seqeval say of B, I, E, S and O.
(conlleval alone would take a B after an E of its type as the same chunk; no scheme of its own has
both.) A type is all that follows the first hyphen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from palm_ds.common.errors import UserError, suggest
from palm_ds.tasks.metrics.counts import Counts

SCHEMES = ("IO", "BIO", "IOB1", "IOE1", "IOE2", "BIOES")
OTHER_NAMES = {
    "plain": "IO",
    "IOB": "BIO",
    "IOB2": "BIO",
    "IOE": "IOE2",
    "IOBES": "BIOES",
}
"""PALM's, ERNIE's and Paddle's words for them."""
IN_A_TYPE = {"IO": "I", "BIO": "BI", "IOE2": "IE", "BIOES": "BIES"}
"""Paddle's order of the tags of one type: id = type * len(order) + place, and O is the last id."""


class Chunk(NamedTuple):
    """Tokens `start` up to, not including, `end`; an untyped tag ("B") has the type ""."""

    start: int
    end: int
    type: str


class Invalid(NamedTuple):
    """The first tag that breaks a scheme, and what that scheme writes in its place."""

    position: int
    tag: str
    right: str


@dataclass(frozen=True, kw_only=True)
class ChunkScores:
    """What conlleval prints: all chunks, those of each type, and the share of right tags."""

    overall: Counts
    types: dict[str, Counts]
    tag_accuracy: float


def scheme_named(name: str) -> str:
    """One of SCHEMES, by any of its names; a UserError for another."""
    scheme = OTHER_NAMES.get(name, name)
    if scheme not in SCHEMES:
        raise UserError(f'no tagging scheme "{name}"{suggest(name, [*SCHEMES, *OTHER_NAMES])}')
    return scheme


def chunks(tags: Iterable[str]) -> list[Chunk]:
    """The chunks of one sentence's tags, in order, whatever the scheme; none of no tags."""
    found: list[Chunk] = []
    start, before, before_type = 0, "O", ""
    for i, tag in enumerate([*tags, "O"]):
        letter, kind = split_tag(tag)
        if before != "O" and _parts(before, before_type, letter, kind):
            found.append(Chunk(start, i, before_type))
            start = i
        elif before == "O":
            start = i
        before, before_type = letter, kind
    return found


def _parts(before: str, before_type: str, letter: str, kind: str) -> bool:
    """Does a chunk end between these two tags, of which the first is not O?"""
    return letter in "OBS" or before in "ES" or before_type != kind


def split_tag(tag: str) -> tuple[str, str]:
    """Letter and type: ("B", "PER") of B-PER, ("O", "") of O; a UserError for no tag."""
    letter, _, kind = tag.partition("-")
    if letter not in ("O", "B", "I", "E", "S") or (letter == "O" and tag != "O"):
        raise UserError(f'"{tag}" is no tag: O, or one of B, I, E, S and a type, such as B-PER')
    return letter, kind


def tags_of(found: Iterable[Chunk], length: int, scheme: str) -> list[str]:
    """The `length` tags of one sentence's chunks. All schemes but IO keep every chunk apart.

    Chunks that overlap or reach outside the sentence are a UserError.
    """
    scheme, tags = scheme_named(scheme), ["O"] * length
    row = [Chunk(0, 0, ""), *sorted(found), Chunk(length, length, "")]
    for before, chunk, after in zip(row, row[1:], row[2:], strict=False):
        if not before.end <= chunk.start < chunk.end <= after.start:
            raise UserError(f"{chunk} is empty, overlaps a chunk, or is outside of {length} tokens")
        letters = _letters(
            chunk.end - chunk.start,
            scheme,
            follows=before.start < before.end == chunk.start and before.type == chunk.type,
            followed=chunk.end == after.start < after.end and after.type == chunk.type,
        )
        tags[chunk.start : chunk.end] = [f"{x}-{chunk.type}" if chunk.type else x for x in letters]
    return tags


def _letters(size: int, scheme: str, *, follows: bool, followed: bool) -> str:
    """A chunk's letters; `follows`: a chunk of its type is right before it, `followed`: after."""
    inner = "I" * (size - 1)
    if scheme == "BIOES":
        return "S" if size == 1 else f"B{inner[1:]}E"
    if scheme.startswith("IOE"):
        return inner + ("E" if scheme == "IOE2" or followed else "I")
    return ("B" if scheme == "BIO" or (scheme == "IOB1" and follows) else "I") + inner


def convert(tags: Sequence[str], scheme: str) -> list[str]:
    """The same chunks written in `scheme`; the scheme of `tags` need not be known."""
    return tags_of(chunks(tags), len(tags), scheme)


def check_scheme(tags: Sequence[str], scheme: str) -> Invalid | None:
    """The first tag that is not what `scheme` writes for the chunks that `tags` are read as; None
    where all are. In BIO an I-PER after O is one: B-PER would be right."""
    for i, (tag, right) in enumerate(zip(tags, convert(tags, scheme), strict=True)):
        if tag != right:
            return Invalid(i, tag, right)
    return None


def chunk_scores(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]
) -> ChunkScores:
    """Precision, recall and F1 of chunks, over all sentences: a list of tags for each.

    A chunk is right where its start, end and type are. A sentence of another length than its
    labels' is a UserError. Of no sentences: 0, and a tag accuracy of nan.
    """
    right: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    same_tags, tokens = 0, 0
    for ours, theirs in _sentences(predictions, labels):
        mine, wanted = chunks(ours), chunks(theirs)
        predicted.update(chunk.type for chunk in mine)
        expected.update(chunk.type for chunk in wanted)
        right.update(chunk.type for chunk in set(mine) & set(wanted))
        same_tags += sum(a == b for a, b in zip(ours, theirs, strict=True))
        tokens += len(theirs)
    types = {
        kind: Counts(right[kind], predicted[kind], expected[kind])
        for kind in sorted({*predicted, *expected})
    }
    return ChunkScores(
        overall=sum(types.values(), Counts()),
        types=types,
        tag_accuracy=same_tags / tokens if tokens else float("nan"),
    )


def _sentences(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]
) -> Iterable[tuple[Sequence[str], Sequence[str]]]:
    if len(predictions) != len(labels):
        raise UserError(f"{len(predictions)} predicted tag sequences, but {len(labels)} labelled")
    for i, (ours, theirs) in enumerate(zip(predictions, labels, strict=True)):
        if len(ours) != len(theirs):
            raise UserError(f"sentence {i}: {len(ours)} predicted tags, but {len(theirs)} labels")
        yield ours, theirs


def chunk_eval(
    predictions: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    scheme: str,
    types: int,
) -> Counts:
    """Paddle's `chunk_eval`, which ERNIE's tagging reports: chunks of tag ids, 0..types * tags in
    a type, the last one O. `scheme`: IO (plain), IOB, IOE or IOBES. 0 of no sentences."""
    letters = IN_A_TYPE.get(scheme_named(scheme))
    if letters is None:
        raise UserError(f'tag ids have no order in "{scheme}"; known: {", ".join(IN_A_TYPE)}')
    names = [f"{letter}-{kind}" for kind in range(types) for letter in letters] + ["O"]
    return chunk_scores(_named(predictions, names), _named(labels, names)).overall


def _named(sentences: Sequence[Sequence[int]], names: Sequence[str]) -> list[list[str]]:
    for i, ids in enumerate(sentences):
        if any(not 0 <= number < len(names) for number in ids):
            raise UserError(f"sentence {i}: a tag id outside of 0..{len(names) - 1}")
    return [[names[number] for number in ids] for ids in sentences]


def types_of_labels(labels: int, scheme: str) -> int:
    """How many types a label map of so many tags has, O among them (ERNIE's num_chunk_types)."""
    return (labels - 1) // len(IN_A_TYPE[scheme_named(scheme)])
