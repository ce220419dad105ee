"""Chunks in tag sequences: tagging schemes, conversion, and F1 as in conlleval.

    IO      I-PER I-PER O      adjacent chunks of one type are merged
    BIO     B-PER I-PER O      (IOB2, IOB) every chunk starts with B
    IOB1    I-PER I-PER O      B only after a chunk of the same type
    IOE2    I-PER E-PER O      (IOE) every chunk ends with E
    IOE1    I-PER I-PER O      E only before a chunk of the same type
    BIOES   B-PER E-PER O      (IOBES) as BIO with E at the end; S for a chunk of one token

BILOU's L and U are read as E and S, and the M of BMES as I.

One set of rules reads all schemes, so reading needs no scheme and accepts sequences that violate
their scheme. The rules are those of conlleval (E. Tjong Kim Sang, CoNLL-2000) for B, I, E and O,
extended with those of Paddle's `chunk_eval` and of seqeval for B, I, E, S and O. (conlleval alone
continues a chunk at a B after an E of its type; none of its schemes has both.) The type of a tag is
everything after the first hyphen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from palm_ds.common.errors import UserError, suggest
from palm_ds.tasks.metrics.counts import MatchCounts

SCHEMES = ("IO", "BIO", "IOB1", "IOE1", "IOE2", "BIOES")
OTHER_NAMES = {
    "plain": "IO",
    "IOB": "BIO",
    "IOB2": "BIO",
    "IOE": "IOE2",
    "IOBES": "BIOES",
}
"""Names of the schemes in PALM, ERNIE and Paddle."""
LETTERS_OF_OTHERS = {"L": "E", "U": "S", "M": "I"}
"""What BILOU and BMES call the letters of BIOES."""
IN_A_TYPE = {"IO": "I", "BIO": "BI", "IOE2": "IE", "BIOES": "BIES"}
"""Paddle's order of the tags of one type: id = type * len(order) + place; O has the last id."""


class Chunk(NamedTuple):
    """Tokens [start, end) of one type; an untyped tag ("B") has the type ""."""

    start: int
    end: int
    type: str


class Invalid(NamedTuple):
    """The first tag that violates a scheme, and the tag the scheme requires there."""

    position: int
    tag: str
    right: str


@dataclass(frozen=True, kw_only=True)
class ChunkScores:
    """conlleval's output: counts over all chunks and by type, and the tag accuracy."""

    overall: MatchCounts
    types: dict[str, MatchCounts]
    tag_accuracy: float


def scheme_named(name: str) -> str:
    """The scheme in SCHEMES with this name or alias. Raises UserError for an unknown name."""
    scheme = OTHER_NAMES.get(name, name)
    if scheme not in SCHEMES:
        raise UserError(f'unknown tagging scheme "{name}"{suggest(name, [*SCHEMES, *OTHER_NAMES])}')
    return scheme


def chunks(tags: Iterable[str]) -> list[Chunk]:
    """The chunks of one sentence in order, read from tags of any scheme."""
    runs: list[Chunk] = []
    start, before, before_type = 0, "O", ""
    for i, tag in enumerate([*tags, "O"]):
        letter, kind = split_tag(tag)
        if before != "O" and _parts(before, before_type, letter, kind):
            runs.append(Chunk(start, i, before_type))
            start = i
        elif before == "O":
            start = i
        before, before_type = letter, kind
    return runs


def _parts(before: str, before_type: str, letter: str, kind: str) -> bool:
    """Whether a chunk ends between two tags; the first is not O."""
    return letter in "OBS" or before in "ES" or before_type != kind


def split_tag(tag: str) -> tuple[str, str]:
    """Letter and type of a tag: ("B", "PER") for B-PER, ("O", "") for O. Raises UserError if it is
    not a tag."""
    letter, _, kind = tag.partition("-")
    if kind:
        letter = LETTERS_OF_OTHERS.get(letter, letter)
    if letter not in ("O", "B", "I", "E", "S") or (letter == "O" and tag != "O"):
        raise UserError(
            f'"{tag}" is not a tag; expected O, or B, I, E or S with a type, such as B-PER'
        )
    return letter, kind


def as_tag(letter: str, kind: str) -> str:
    """The tag with these, as `split_tag` reads it."""
    return f"{letter}-{kind}" if kind else letter


def tags_of(spans: Iterable[Chunk], length: int, scheme: str) -> list[str]:
    """The tags of a sentence of `length` tokens with these chunks. Only IO merges adjacent chunks.

    Raises UserError if chunks overlap or exceed the sentence.
    """
    scheme, tags = scheme_named(scheme), ["O"] * length
    row = [Chunk(0, 0, ""), *sorted(spans), Chunk(length, length, "")]
    for before, chunk, after in zip(row, row[1:], row[2:], strict=False):
        if not before.end <= chunk.start < chunk.end <= after.start:
            raise UserError(
                f"{chunk} is empty, overlaps another chunk, or exceeds the {length} tokens"
            )
        letters = _letters(
            chunk.end - chunk.start,
            scheme,
            follows=before.start < before.end == chunk.start and before.type == chunk.type,
            followed=chunk.end == after.start < after.end and after.type == chunk.type,
        )
        tags[chunk.start : chunk.end] = [as_tag(letter, chunk.type) for letter in letters]
    return tags


def _letters(size: int, scheme: str, *, follows: bool, followed: bool) -> str:
    """The letters of a chunk; `follows` and `followed`: next to a chunk of the same type."""
    inner = "I" * (size - 1)
    if scheme == "BIOES":
        return "S" if size == 1 else f"B{inner[1:]}E"
    if scheme.startswith("IOE"):
        return inner + ("E" if scheme == "IOE2" or followed else "I")
    return ("B" if scheme == "BIO" or (scheme == "IOB1" and follows) else "I") + inner


def convert(tags: Sequence[str], scheme: str) -> list[str]:
    """The same chunks written in `scheme`; the scheme of `tags` does not matter."""
    return tags_of(chunks(tags), len(tags), scheme)


def check_scheme(tags: Sequence[str], scheme: str) -> Invalid | None:
    """The first tag that differs from how `scheme` writes the same chunks; None if all tags agree.

    In BIO an I-PER after O is invalid: B-PER is required."""
    for i, (tag, right) in enumerate(zip(tags, convert(tags, scheme), strict=True)):
        if tag != right and split_tag(tag) != split_tag(right):
            return Invalid(i, tag, right)
    return None


def chunk_scores(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]
) -> ChunkScores:
    """Precision, recall and F1 of chunks over all sentences, each a list of tags.

    A chunk is correct if its start, end and type are. Without sentences the scores are 0 and the
    tag accuracy is NaN. Raises UserError if a sentence and its labels differ in length.
    """
    right: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    same_tags, tokens = 0, 0
    for tags, labeled in _sentences(predictions, labels):
        predicted_chunks, wanted = chunks(tags), chunks(labeled)
        predicted.update(chunk.type for chunk in predicted_chunks)
        expected.update(chunk.type for chunk in wanted)
        right.update(chunk.type for chunk in set(predicted_chunks) & set(wanted))
        same_tags += sum(a == b for a, b in zip(tags, labeled, strict=True))
        tokens += len(labeled)
    types = {
        kind: MatchCounts(right[kind], predicted[kind], expected[kind])
        for kind in sorted({*predicted, *expected})
    }
    return ChunkScores(
        overall=sum(types.values(), MatchCounts()),
        types=types,
        tag_accuracy=same_tags / tokens if tokens else float("nan"),
    )


def _sentences(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]
) -> Iterable[tuple[Sequence[str], Sequence[str]]]:
    if len(predictions) != len(labels):
        raise UserError(
            f"{len(predictions)} predicted tag sequences, but {len(labels)} labeled ones"
        )
    for i, (tags, labeled) in enumerate(zip(predictions, labels, strict=True)):
        if len(tags) != len(labeled):
            raise UserError(f"sentence {i}: {len(tags)} predicted tags, but {len(labeled)} labels")
        yield tags, labeled


def chunk_eval(
    predictions: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    scheme: str,
    types: int,
) -> MatchCounts:
    """Paddle's `chunk_eval`, as reported by ERNIE's tagging: counts chunks of tag ids.

    Ids are 0..types * tags of a type, in the order of IN_A_TYPE; the last is O. `scheme`: IO
    (plain), IOB, IOE or IOBES."""
    letters = IN_A_TYPE.get(scheme_named(scheme))
    if letters is None:
        raise UserError(f'"{scheme}" has no order of tag ids; choose one of {", ".join(IN_A_TYPE)}')
    names = [f"{letter}-{kind}" for kind in range(types) for letter in letters] + ["O"]
    return chunk_scores(_named(predictions, names), _named(labels, names)).overall


def _named(sentences: Sequence[Sequence[int]], names: Sequence[str]) -> list[list[str]]:
    for i, ids in enumerate(sentences):
        if any(not 0 <= number < len(names) for number in ids):
            raise UserError(f"sentence {i}: a tag id is outside 0..{len(names) - 1}")
    return [[names[number] for number in ids] for ids in sentences]


def types_of_labels(labels: int, scheme: str) -> int:
    """Number of types in a label map of `labels` tags including O (ERNIE's num_chunk_types)."""
    return (labels - 1) // len(IN_A_TYPE[scheme_named(scheme)])
