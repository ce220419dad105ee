"""Compared with the official scripts of SQuAD and CMRC2018, reimplemented here step by step."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics import answers as it
from tests.tasks.metrics.patient import patiently

# The rules of SQuAD ------------------------------------------------------------------------------


def squad_words(text: str) -> list[str]:
    kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
    for article in ("a", "an", "the"):
        kept = re.sub(rf"\b{article}\b", " ", kept)
    return kept.split()


def squad_pair(prediction: str, answer: str, *, version: int) -> tuple[float, float]:
    """Exact match and F1."""
    ours, theirs = squad_words(prediction), squad_words(answer)
    same = float(" ".join(ours) == " ".join(theirs))
    if version == 2 and (not ours or not theirs):
        return same, float(ours == theirs)
    left, shared = Counter(theirs), 0
    for word in ours:
        if left[word] > 0:
            left[word] -= 1
            shared += 1
    if not shared:
        return same, 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return same, 2 * precision * recall / (precision + recall)


def squad_slowly(
    predictions: dict[str, str], references: dict[str, list[str]], version: int
) -> dict[str, tuple[float, float]]:
    scores = {}
    for name, answers in references.items():
        if version == 2:
            answers = [answer for answer in answers if squad_words(answer)] or [""]
        if name in predictions:
            pairs = [squad_pair(predictions[name], a, version=version) for a in answers]
            scores[name] = tuple(max(values) for values in zip(*pairs, strict=True))
        else:
            scores[name] = (0.0, 0.0)
    return scores


def official_search(
    predictions: dict[str, str],
    scores: dict[str, float],
    odds: dict[str, float],
    answerable: dict[str, bool],
) -> tuple[float, float]:
    """`find_best_thresh` of evaluate-v2.0.py."""
    now = best = sum(1 for each in answerable.values() if not each)
    threshold = 0.0
    for name in sorted(odds, key=lambda each: odds[each]):
        if answerable[name]:
            now += scores[name]
        elif predictions[name]:
            now -= 1
        if now > best:
            best, threshold = now, odds[name]
    return best / len(scores), threshold


WORDS = some.sampled_from(["the", "a", "an", "Cat", "cat.", "dog", "dog's", "-", "U.S.", "theatre"])
TEXTS = some.lists(WORDS, max_size=4).map(" ".join)
QUESTIONS = some.lists(
    some.tuples(TEXTS, some.lists(TEXTS, max_size=3), some.integers(0, 6)), min_size=1, max_size=12
)
Questions = list[tuple[str, list[str], int]]


def by_name(questions: Questions) -> tuple[dict[str, str], dict[str, list[str]], dict[str, float]]:
    names = [f"q{i}" for i in range(len(questions))]
    predictions = {name: text for name, (text, _, _) in zip(names, questions, strict=True)}
    references = {name: answers for name, (_, answers, _) in zip(names, questions, strict=True)}
    odds = {name: float(value) for name, (_, _, value) in zip(names, questions, strict=True)}
    return predictions, references, odds


def means(scores: dict[str, tuple[float, float]]) -> tuple[float, float]:
    exact, f1 = np.array(list(scores.values())).mean(axis=0)
    return exact, f1


@patiently
@given(QUESTIONS)
def test_squad_1(questions: Questions) -> None:
    predictions, references, _ = by_name([(p, a or ["cat"], o) for p, a, o in questions])
    found = it.squad_v1(predictions, references)
    expected = means(squad_slowly(predictions, references, 1))
    assert (found["exact"], found["f1"]) == pytest.approx(expected)
    assert 0 <= found["f1"] <= 1


@patiently
@given(QUESTIONS)
def test_squad_2(questions: Questions) -> None:
    predictions, references, _ = by_name(questions)
    found = it.squad_v2(predictions, references)
    scores = squad_slowly(predictions, references, 2)
    assert (found["exact"], found["f1"]) == pytest.approx(means(scores))
    for prefix, wanted in (("has_answer", True), ("no_answer", False)):
        part = {name: each for name, each in scores.items() if bool(references[name]) == wanted}
        assert found.get(f"{prefix}_total", 0) == len(part)
        if part:
            of_part = (found[f"{prefix}_exact"], found[f"{prefix}_f1"])
            assert of_part == pytest.approx(means(part))


@patiently
@given(QUESTIONS, some.integers(-1, 7))
def test_squad_2_with_a_threshold_scores_the_thresholded_answers(
    questions: Questions, threshold: int
) -> None:
    # The official script takes an answer without words for one, but an empty text for right.
    wordy = [(text, [f"{answer} cat" for answer in answers], o) for text, answers, o in questions]
    predictions, references, odds = by_name(wordy)
    given_then = {
        name: "" if odds[name] > threshold else text for name, text in predictions.items()
    }
    with_odds = it.squad_v2(predictions, references, odds, threshold)
    without = it.squad_v2(given_then, references)
    assert {name: with_odds[name] for name in without} == pytest.approx(without)


@patiently
@given(QUESTIONS)
def test_the_best_threshold_is_optimal_and_reaches_its_score(questions: Questions) -> None:
    predictions, references, odds = by_name(questions)
    found = it.squad_v2(predictions, references, odds)
    tried = [-1.0, *sorted(set(odds.values()))]
    all_scores = [it.squad_v2(predictions, references, odds, each) for each in tried]
    for name in ("exact", "f1"):
        best = max(each[name] for each in all_scores)
        assert found[f"best_{name}"] == pytest.approx(best)
        used = it.squad_v2(predictions, references, odds, found[f"best_{name}_threshold"])
        assert used[name] == pytest.approx(best)


@patiently
@given(QUESTIONS, some.permutations(range(12)))
def test_the_search_equals_the_official_one_without_ties(
    questions: Questions, places: list[int]
) -> None:
    wordy = [(f"{text} cat", answers, 0) for text, answers, _ in questions]
    predictions, references, odds = by_name(wordy)
    odds = {name: 1.0 + place for name, place in zip(odds, places, strict=False)}
    scores = squad_slowly(predictions, references, 2)
    answerable = {name: bool(answers) for name, answers in references.items()}
    found = it.squad_v2(predictions, references, odds)
    for column, name in enumerate(("exact", "f1")):
        single = {each: values[column] for each, values in scores.items()}
        best, threshold = official_search(predictions, single, odds, answerable)
        assert found[f"best_{name}"] == pytest.approx(best)
        if name == "exact":  # whole numbers: no difference of rounding decides
            ours = found["best_exact_threshold"]
            nothing = np.nextafter(min(odds.values()), -math.inf)  # the official one says 0
            assert ours == (threshold or nothing)


def test_two_bugs_of_the_official_search_are_not_reproduced() -> None:
    odds = {"x": 0.5, "y": 0.5}
    predictions, references = {"x": "cat", "y": "cat"}, {"x": ["cat"], "y": []}
    answerable = {"x": True, "y": False}
    official = official_search(predictions, {"x": 1.0, "y": 0.0}, odds, answerable)
    assert official == (1.0, 0.5)  # between the two, where no threshold is
    assert it.squad_v2(predictions, references, odds, 0.5)["exact"] == 0.5
    assert it.squad_v2(predictions, references, odds)["best_exact"] == 0.5
    odds["y"], predictions["y"] = 0.4, "the"  # no words: rightly no answer
    official = official_search(predictions, {"x": 1.0, "y": 1.0}, odds, answerable)
    assert official == (0.5, 0.0)
    assert it.squad_v2(predictions, references, odds, 0.5)["exact"] == 1.0
    assert it.squad_v2(predictions, references, odds)["best_exact"] == 1.0


def test_squad_by_hand() -> None:
    assert it.normalized(" The U.S.  theatre, an  A-team!") == "us theatre ateam"
    assert it.exact("The Cat.", "cat") == 1.0
    assert it.overlap("the black cat", "cat sat") == 0.5
    assert it.overlap("cat cat", "cat") == pytest.approx(2 / 3)
    assert it.overlap("the", "a") == 0.0 and it.overlap_or_none("the", "a") == 1.0
    found = it.squad_v1({"1": "cat"}, {"1": ["dog", "the cat"], "2": ["dog"]})
    assert found == {"f1": 0.5, "exact": 0.5, "total": 2, "skipped": 1}
    assert next(iter(found)) == "f1"


def test_a_threshold_for_no_answers_is_below_all_odds() -> None:
    best = it.best_threshold([0.0, 0.0], [-3.0, 2.0], [False, False])
    assert best.score == 1.0 and -3.1 < best.odds < -3.0


# The rules of CMRC2018 ---------------------------------------------------------------------------

MARKS = "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"


def cmrc_segments(text: str, words: Callable[[str], list[str]]) -> list[str]:
    units, rest = [], ""
    for char in text.lower().strip():
        if char in MARKS:
            continue
        if "\u4e00" <= char <= "\u9fa5":
            units += [*words(rest), char]
            rest = ""
        else:
            rest += char
    return units + words(rest)


def cmrc_pair(prediction: str, answer: str) -> tuple[float, float]:
    """Exact match and F1, by the table of common runs."""
    bare = ["".join(c for c in x.lower().strip() if c not in MARKS) for x in (prediction, answer)]
    ours, theirs = cmrc_segments(prediction, str.split), cmrc_segments(answer, str.split)
    table = [[0] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    longest = 0
    for i, a in enumerate(ours):
        for j, b in enumerate(theirs):
            if a == b:
                table[i + 1][j + 1] = table[i][j] + 1
                longest = max(longest, table[i + 1][j + 1])
    if not longest:
        return float(bare[0] == bare[1]), 0.0
    precision, recall = longest / len(ours), longest / len(theirs)
    return float(bare[0] == bare[1]), 2 * precision * recall / (precision + recall)


CHINESE = some.lists(
    some.sampled_from([*"天地天人，。《》-·", " ", "BERT", "2018", "x "]), max_size=12
)


@patiently
@given(CHINESE.map("".join), some.lists(CHINESE.map("".join), min_size=1, max_size=3))
def test_cmrc(prediction: str, answers: list[str]) -> None:
    pairs = [cmrc_pair(prediction, answer) for answer in answers]
    exact, f1 = (max(values) for values in zip(*pairs, strict=True))
    found = it.cmrc({"1": prediction}, {"1": answers})
    assert (found["exact"], found["f1"]) == pytest.approx((exact, f1))
    assert found["average"] == pytest.approx((exact + f1) / 2)
    swapped = [it.cmrc_overlap(answer, prediction) for answer in answers]
    assert max(swapped) == pytest.approx(f1)


def test_cmrc_by_hand() -> None:
    assert it.segments("《战国无双3》是由ω-Force开发") == [
        *"战国无双",
        "3",
        *"是由",
        "ωforce",
        *"开发",
    ]
    assert it.cmrc_overlap("光荣和开发", "光荣开发") == pytest.approx(2 * 2 / 9)  # in one piece
    assert it.cmrc_exact("《光荣》。", "光荣") == 1.0
    assert it.cmrc_exact("光 荣", "光荣") == 0.0  # inner space stays
    found = it.cmrc({"1": "光荣"}, {"1": ["光", "光荣"], "2": ["光"]})
    assert found == {"average": 0.5, "f1": 0.5, "exact": 0.5, "total": 2, "skipped": 1}
    assert next(iter(found)) == "average"


@pytest.mark.parametrize(
    ("text", "words"),
    [  # as NLTK's word tokenizer cuts them
        ("hello world", ["hello", "world"]),
        ("1,234.5 km", ["1,234.5", "km"]),
        ("u.s.a today.", ["u.s.a", "today", "."]),
        ("(50%), ok?", ["(", "50", "%", ")", ",", "ok", "?"]),
        ("no.1, then", ["no.1", ",", "then"]),
        ("wait... what", ["wait", "...", "what"]),
        ("$5 & #3", ["$", "5", "&", "#", "3"]),
    ],
)
def test_words_between_han_characters(text: str, words: list[str]) -> None:
    assert it.segments(text) == words
    assert it.segments(f"天{text}地") == ["天", *words, "地"]


def questions_of(path: Path) -> dict[str, list[str]]:
    return {
        question["id"]: [answer["text"] for answer in question["answers"]]
        for article in json.loads(path.read_text())["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    }


@pytest.mark.parametrize(
    ("path", "measure"),
    [
        ("zh/cmrc2018/cmrc2018_dev.json", it.cmrc),
        ("zh/drcd/DRCD_dev.json", it.cmrc),
        ("en/xquad/xquad.en.articles00-35.json", it.squad_v1),
        ("en/xquad/xquad.en.articles00-35.json", it.squad_v2),
    ],
)
def test_real_answers_score_one_and_halves_score_less(
    shared: Path, path: str, measure: Callable[..., dict[str, float]]
) -> None:
    references = questions_of(shared / "data/finetune" / path)
    assert len(references) > 300
    found = measure({name: answers[0] for name, answers in references.items()}, references)
    assert found["exact"] == found["f1"] == 1.0
    halves = {name: answers[0][: len(answers[0]) // 2] for name, answers in references.items()}
    found = measure(halves, references)
    assert found["exact"] < 0.2 < found["f1"] < 0.9


# Mistakes ----------------------------------------------------------------------------------------


def test_nothing_to_score() -> None:
    for measure in (it.squad_v1, it.squad_v2, it.cmrc):
        found = measure({}, {})
        assert math.isnan(found["f1"]) and math.isnan(found["exact"]) and found["total"] == 0
    assert "best_f1" not in it.squad_v2({}, {}, {})


def test_missing_answers_are_named() -> None:
    for measure in (it.squad_v1, it.cmrc):
        with pytest.raises(UserError, match='question "7" has no answer'):
            measure({}, {"7": []})
    for odds in ({}, {"7": math.nan}):
        with pytest.raises(UserError, match='question "7" has no no-answer odds'):
            it.squad_v2({"7": ""}, {"7": []}, odds)
    with pytest.raises(UserError, match="`threshold` needs `odds`"):
        it.squad_v2({"7": ""}, {"7": []}, threshold=0.5)
