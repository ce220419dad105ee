"""Compared with conlleval's rules and Paddle's chunk_eval, both reimplemented here."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics import chunks as it
from palm_ds.tasks.metrics.chunks import Chunk, Invalid
from tests.tasks.metrics.patient import patiently

# conlleval ---------------------------------------------------------------------------------------

ENDS = {"BB", "BO", "IB", "IO", "EE", "EI", "EO"}
STARTS = {"BB", "IB", "OB", "OI", "EE", "EI", "OE"}


def ends(before: tuple[str, str], now: tuple[str, str]) -> bool:
    return before[0] + now[0] in ENDS or (before[0] != "O" and before[1] != now[1])


def starts(before: tuple[str, str], now: tuple[str, str]) -> bool:
    return before[0] + now[0] in STARTS or (now[0] != "O" and before[1] != now[1])


def conlleval(
    predictions: list[list[str]], labels: list[list[str]]
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Correct, predicted and expected chunks by type, counted line by line as in the Perl
    script."""
    right, predicted, expected = Counter[str](), Counter[str](), Counter[str]()
    lines = []
    for ours, theirs in zip(predictions, labels, strict=True):
        lines += [*zip(ours, theirs, strict=True), ("O", "O")]
    last_ours = last_theirs = ("O", "")
    in_correct = False
    for line in lines:
        ours, theirs = [(tag + "-").split("-")[:2] for tag in line]
        ours, theirs = (ours[0], ours[1]), (theirs[0], theirs[1])
        if in_correct:
            end, their_end = ends(last_ours, ours), ends(last_theirs, theirs)
            if end and their_end and last_ours[1] == last_theirs[1]:
                in_correct = False
                right[last_theirs[1]] += 1
            elif end != their_end or ours[1] != theirs[1]:
                in_correct = False
        start, their_start = starts(last_ours, ours), starts(last_theirs, theirs)
        if start and their_start and ours[1] == theirs[1]:
            in_correct = True
        expected[theirs[1]] += their_start
        predicted[ours[1]] += start
        last_ours, last_theirs = ours, theirs
    return right, +predicted, +expected


def sentences(letters: str) -> some.SearchStrategy[list[list[tuple[str, str]]]]:
    """Pairs of random tag sequences: most of them violate every scheme."""
    kinds = some.sampled_from(["-X", "-Y", ""])
    tag = some.just("O") | some.tuples(some.sampled_from(letters), kinds).map("".join)
    return some.lists(some.lists(some.tuples(tag, tag), max_size=12), max_size=4)


@pytest.mark.parametrize("letters", ["BI", "IE", "I"])
def test_chunks_are_counted_as_conlleval_does(letters: str) -> None:
    @patiently
    @given(sentences(letters))
    def check(pairs: list[list[tuple[str, str]]]) -> None:
        predictions = [[tag for tag, _ in sentence] for sentence in pairs]
        labels = [[tag for _, tag in sentence] for sentence in pairs]
        found = it.chunk_scores(predictions, labels)
        right, predicted, expected = conlleval(predictions, labels)
        assert {kind: each.right for kind, each in found.types.items() if each.right} == right
        counted = {kind: each.predicted for kind, each in found.types.items() if each.predicted}
        assert counted == predicted
        counted = {kind: each.expected for kind, each in found.types.items() if each.expected}
        assert counted == expected
        assert found.overall.right == right.total()
        assert 0 <= found.overall.f1 <= 1

    check()


def test_by_hand() -> None:
    labels = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "B-ORG"]]
    predictions = [["B-PER", "I-PER", "O", "B-ORG"], ["B-ORG", "I-ORG"]]
    found = it.chunk_scores(predictions, labels)
    assert (found.overall.right, found.overall.predicted, found.overall.expected) == (1, 3, 4)
    assert (found.overall.precision, found.overall.recall) == (1 / 3, 1 / 4)
    assert found.overall.f1 == pytest.approx(2 / 7)
    assert found.types["PER"].f1 == 1.0 and found.types["LOC"].recall == 0.0
    assert found.tag_accuracy == 4 / 6


# Paddle's chunk_eval -----------------------------------------------------------------------------

PADDLE = {"IOB": (2, 0, 1, -1, -1), "IOE": (2, -1, 0, 1, -1), "IOBES": (4, 0, 1, 2, 3)}


def paddle_segments(ids: list[int], scheme: str, types: int) -> list[tuple[int, int, int]]:
    """The operator's decisions, tag by tag: segments with their last token."""
    tag_types, begin, _, end, single = PADDLE.get(scheme, (1, -1, -1, -1, -1))
    found, start, inside = [], 0, False
    tag, kind = -1, types
    for i, number in enumerate([*ids, types * tag_types]):
        before, kind_before = tag, kind
        kind, tag = divmod(number, tag_types)
        if kind_before == types:
            stop, go = False, kind != types
        elif kind in (types,) or kind != kind_before:
            stop, go = True, kind != types
        else:
            stop = before in (end, single) or tag in (begin, single)
            go = tag in (begin, single) or before in (end, single)
            if scheme == "plain":
                stop = go = False
        if inside and stop:
            found.append((start, i - 1, kind_before))
            inside = False
        if go:
            start, inside = i, True
    return found


@pytest.mark.parametrize("scheme", ["plain", "IOB", "IOE", "IOBES"])
def test_tag_ids_are_scored_as_paddle_does(scheme: str) -> None:
    last = 3 * PADDLE.get(scheme, (1,))[0]
    ids = some.integers(0, last)

    @patiently
    @given(some.lists(some.lists(some.tuples(ids, ids), max_size=12), max_size=4))
    def check(pairs: list[list[tuple[int, int]]]) -> None:
        predictions = [[number for number, _ in sentence] for sentence in pairs]
        labels = [[number for _, number in sentence] for sentence in pairs]
        ours = [set(paddle_segments(each, scheme, 3)) for each in predictions]
        theirs = [set(paddle_segments(each, scheme, 3)) for each in labels]
        found = it.chunk_eval(predictions, labels, scheme, 3)
        assert found.predicted == sum(map(len, ours))
        assert found.expected == sum(map(len, theirs))
        assert found.right == sum(len(a & b) for a, b in zip(ours, theirs, strict=True))

    check()
    assert it.types_of_labels(last + 1, scheme) == 3


def test_bies_continues_chunks_that_conlleval_would_split() -> None:
    tags = ["S-X", "S-X", "B-X", "E-X", "B-X", "I-X", "E-X", "I-X"]
    assert [chunk[:2] for chunk in it.chunks(tags)] == [(0, 1), (1, 2), (2, 4), (4, 7), (7, 8)]


# Schemes -----------------------------------------------------------------------------------------

WRITTEN = {
    "IO": "I-X I-X I-X O I-X I-Y I-Y I-Y",
    "BIO": "B-X I-X B-X O B-X B-Y I-Y B-Y",
    "IOB1": "I-X I-X B-X O I-X I-Y I-Y B-Y",
    "IOE1": "I-X E-X I-X O I-X I-Y E-Y I-Y",
    "IOE2": "I-X E-X E-X O E-X I-Y E-Y E-Y",
    "BIOES": "B-X E-X S-X O S-X B-Y E-Y S-Y",
}
KEEPING = [scheme for scheme in it.SCHEMES if scheme != "IO"]


@pytest.mark.parametrize("scheme", it.SCHEMES)
def test_every_scheme_by_hand(scheme: str) -> None:
    found = [Chunk(0, 2, "X"), Chunk(2, 3, "X"), Chunk(4, 5, "X"), Chunk(5, 7, "Y")]
    tags = it.tags_of([*found, Chunk(7, 8, "Y")], 8, scheme)
    assert tags == WRITTEN[scheme].split()
    assert it.check_scheme(tags, scheme) is None
    if scheme == "IO":
        assert it.chunks(tags) == [Chunk(0, 3, "X"), Chunk(4, 5, "X"), Chunk(5, 8, "Y")]
    else:
        assert it.chunks(tags) == [*found, Chunk(7, 8, "Y")]


@pytest.mark.parametrize("scheme", KEEPING)
def test_writing_and_reading_lose_nothing(scheme: str) -> None:
    @patiently
    @given(sentences("BIES"))
    def check(pairs: list[list[tuple[str, str]]]) -> None:
        for sentence in pairs:
            tags = [tag for tag, _ in sentence]
            written = it.convert(tags, scheme)
            assert it.chunks(written) == it.chunks(tags)
            assert it.convert(written, scheme) == written
            assert it.check_scheme(written, scheme) is None

    check()


RULES = {
    # (letter before, letter, same type) that a scheme allows; "." is the sentence's edge.
    "BIO": lambda before, now, same: now != "I" or (before in "BI" and same),
    "IOB1": lambda before, now, same: now != "B" or (before in "BI" and same),
    "IOE2": lambda before, now, same: before != "I" or (now in "IE" and same),
    "IOE1": lambda before, now, same: before != "E" or (now in "IE" and same),
    "BIOES": lambda before, now, same: (now in "IE" and same) if before in "BI" else now in "BSO.",
}


@pytest.mark.parametrize(
    ("scheme", "letters"),
    [("BIO", "BI"), ("IOB1", "BI"), ("IOE2", "IE"), ("IOE1", "IE"), ("BIOES", "BIES")],
)
def test_scheme_violations_are_found(scheme: str, letters: str) -> None:
    @patiently
    @given(sentences(letters))
    def check(pairs: list[list[tuple[str, str]]]) -> None:
        for sentence in pairs:
            tags = [tag for tag, _ in sentence]
            split = [(".", ""), *[it.split_tag(tag) for tag in tags], (".", "")]
            steps = zip(split, split[1:], strict=False)
            good = all(RULES[scheme](a[0], b[0], a[1] == b[1]) for a, b in steps)
            assert (it.check_scheme(tags, scheme) is None) == good

    check()


def test_the_first_wrong_tag_is_named_with_the_right_one() -> None:
    assert it.check_scheme(["O", "I-X", "I-X", "I-Y"], "BIO") == Invalid(1, "I-X", "B-X")
    assert it.check_scheme(["B-X", "I-X", "O"], "IOBES") == Invalid(1, "I-X", "E-X")
    assert it.check_scheme(["I-X", "B-X", "B-Y"], "IOB1") == Invalid(2, "B-Y", "I-Y")
    assert it.check_scheme(["I-X", "B-X"], "IO") == Invalid(1, "B-X", "I-X")
    assert it.check_scheme([], "BIO") is None


@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        ("en/wikigold/wikigold.conll.txt", "IO"),
        ("en/wnut17/emerging.dev.conll", "BIO"),
        ("en/wnut17/emerging.test.annotated", "BIO"),
    ],
)
def test_real_tags_follow_their_scheme_and_survive_the_others(
    shared: Path, path: str, scheme: str
) -> None:
    text = (shared / "data/finetune" / path).read_text()
    lines = [block.splitlines() for block in text.replace("\n\t\n", "\n\n").split("\n\n")]
    tagged = [[line.split()[-1] for line in block if line.split()] for block in lines]
    assert sum(map(len, tagged)) > 10_000
    assert [it.check_scheme(tags, scheme) for tags in tagged] == [None] * len(tagged)
    assert it.chunk_scores(tagged, tagged).overall.f1 == 1.0
    for other in KEEPING:
        assert [it.convert(it.convert(tags, other), scheme) for tags in tagged] == tagged


# Mistakes ----------------------------------------------------------------------------------------


def test_types_keep_their_hyphens() -> None:
    assert it.split_tag("B-creative-work") == ("B", "creative-work")
    assert it.convert(["B-creative-work"], "BIOES") == ["S-creative-work"]


@pytest.mark.parametrize("tag", ["", "PER", "X-PER", "b-PER", "O-PER", "BPER"])
def test_no_tags(tag: str) -> None:
    with pytest.raises(UserError, match="is not a tag; expected O, or B, I, E or S"):
        it.chunks(["O", tag])


def test_nothing_to_score() -> None:
    found = it.chunk_scores([], [])
    assert found.overall.f1 == 0.0 and found.types == {} and math.isnan(found.tag_accuracy)
    assert it.chunk_eval([], [], "IOB", 3).f1 == 0.0
    assert it.chunks([]) == [] and it.tags_of([], 0, "BIO") == []


def test_mismatches_are_named() -> None:
    with pytest.raises(UserError, match="2 predicted tag sequences, but 1 labeled"):
        it.chunk_scores([["O"], ["O"]], [["O"]])
    with pytest.raises(UserError, match="sentence 1: 2 predicted tags, but 1 labels"):
        it.chunk_scores([["O"], ["O", "O"]], [["O"], ["O"]])
    with pytest.raises(UserError, match='scheme "BIOE".*did you mean'):
        it.convert(["O"], "BIOE")
    with pytest.raises(UserError, match=r"sentence 0: a tag id is outside 0\.\.6"):
        it.chunk_eval([[7]], [[6]], "IOB", 3)
    with pytest.raises(UserError, match='"IOB1" has no order of tag ids'):
        it.chunk_eval([[0]], [[0]], "IOB1", 3)


@pytest.mark.parametrize(
    "found",
    [
        [Chunk(0, 2, "X"), Chunk(1, 3, "X")],
        [Chunk(2, 5, "X")],
        [Chunk(-1, 2, "X")],
        [Chunk(1, 1, "X")],
    ],
)
def test_chunks_that_cannot_be_written(found: list[Chunk]) -> None:
    with pytest.raises(
        UserError, match="is empty, overlaps another chunk, or exceeds the 4 tokens"
    ):
        it.tags_of(found, 4, "BIO")
