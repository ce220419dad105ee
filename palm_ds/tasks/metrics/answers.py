"""Answers as text: SQuAD 1.1 and 2.0, CMRC2018 and DRCD.

Predictions are {question: text}; references {question: its right answers, any of which counts}.
All figures are means over all questions in `references`, in 0..1 (the official scripts print per
cent); nan of no questions. A question without a prediction counts as wrong and as `skipped`;
predictions of other questions are not looked at.
"""

from __future__ import annotations

import difflib
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.counts import mean

Measure = Callable[[str, str], float]

# SQuAD -----------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """In lower case, without ASCII punctuation, English articles and needless space."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact(prediction: str, answer: str) -> float:
    """1 where both are the same once normalised, else 0."""
    return float(normalised(prediction) == normalised(answer))


def overlap(prediction: str, answer: str) -> float:
    """F1 of the normalised words two texts share, in 0..1; 0 where they share none (SQuAD 1.1)."""
    words, wanted = normalised(prediction).split(), normalised(answer).split()
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted)) if shared else 0.0


def overlap_or_none(prediction: str, answer: str) -> float:
    """`overlap`, but 1 where both are empty once normalised: rightly no answer (SQuAD 2.0)."""
    if not normalised(prediction) and not normalised(answer):
        return 1.0
    return overlap(prediction, answer)


def squad_v1(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """f1, exact, total, skipped, by the official evaluate-v1.1.py (Rajpurkar et al. 2016)."""
    _all_answerable(references)
    return {
        "f1": mean(_best_of_each(predictions, references, overlap)),
        "exact": mean(_best_of_each(predictions, references, exact)),
        **_totals(predictions, references),
    }


class Threshold(NamedTuple):
    """The best mean score, and the odds above which to give no answer in order to get it."""

    score: float
    odds: float


def squad_v2(
    predictions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    odds: Mapping[str, float] | None = None,
    threshold: float | None = None,
) -> dict[str, float]:
    """By the official evaluate-v2.0.py (Rajpurkar et al. 2018): f1, exact, the same of questions
    with an answer (has_answer_*) and without (no_answer_*; their reference is an empty list, the
    right prediction an empty text; left out where there are none), total, skipped.

    With `odds` that a question has no answer (probabilities or any other scale): best_f1,
    best_exact and their thresholds, where `predictions` should be the best non-empty texts. With
    a `threshold` too, predictions with higher odds count as empty in the other figures.

    The official script leaves a question without a prediction out; here it is wrong.
    """
    answerable = np.array([bool(answers) for answers in references.values()], bool)
    wanted = {name: _with_words(answers) for name, answers in references.items()}
    each = {
        "f1": _best_of_each(predictions, wanted, overlap_or_none),
        "exact": _best_of_each(predictions, wanted, exact),
    }
    doubt = None if odds is None else _odds(odds, references)
    silent = np.zeros(len(answerable), bool)
    if threshold is not None:
        if doubt is None:
            raise UserError("a threshold needs the odds that a question has no answer")
        silent = doubt > threshold
    final = {name: np.where(silent, ~answerable, scores) for name, scores in each.items()}
    found = {name: mean(scores) for name, scores in final.items()}
    for prefix, which in (("has_answer", answerable), ("no_answer", ~answerable)):
        if which.any():
            found |= {f"{prefix}_{name}": mean(scores[which]) for name, scores in final.items()}
            found[f"{prefix}_total"] = int(which.sum())
    if doubt is not None and len(doubt):
        for name, scores in each.items():
            best = best_threshold(scores, doubt, answerable)
            found |= {f"best_{name}": best.score, f"best_{name}_threshold": best.odds}
    return found | _totals(predictions, references)


def best_threshold(
    scores: npt.ArrayLike, odds: npt.ArrayLike, answerable: npt.ArrayLike
) -> Threshold:
    """The lowest threshold that gives the best mean, over (n,) questions, n > 0.

    scores: of each prediction, were it given; odds: that there is no answer; answerable: bool.
    The official search, but for two slips that promise what no threshold gives: it also stops
    between equal odds, and takes a text without words ("the") for a wrong answer where there is
    none. Best without any answer, it says 0; here it is the number just below the lowest odds.
    """
    odds, answerable = np.asarray(odds, np.float64), np.asarray(answerable, bool)
    order = np.argsort(odds, kind="stable")
    sorted_odds = odds[order]
    # Answering one more question, the surest first, changes the sum by so much.
    gain = (np.asarray(scores, np.float64) - ~answerable)[order]
    sums = np.concatenate([[0.0], np.cumsum(gain)]) + (~answerable).sum()
    below = np.nextafter(sorted_odds[0], -math.inf)
    stops = np.concatenate([[below], sorted_odds])
    possible = np.append(stops[1:] > stops[:-1], True)  # after the last of equal odds
    at = int(np.argmax(np.where(possible, sums, -math.inf)))
    return Threshold(float(sums[at] / len(odds)), float(stops[at]))


def _with_words(answers: Sequence[str]) -> list[str]:
    """The answers that are more than articles and punctuation; else one empty text."""
    return [text for text in answers if normalised(text)] or [""]


def _odds(
    odds: Mapping[str, float], references: Mapping[str, Sequence[str]]
) -> npt.NDArray[np.float64]:
    for name in references:
        if math.isnan(odds.get(name, math.nan)):
            raise UserError(f'question "{name}" has no odds that it has no answer')
    return np.array([odds[name] for name in references], np.float64)


# CMRC2018 and DRCD -----------------------------------------------------------------------------

_MARKS = dict.fromkeys(map(ord, "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"))
"""What the official script leaves out. It lists …… as well, but looks for single characters."""
_HAN = re.compile("([\u4e00-\u9fa5])")
_ALONE = r";@#$%&?!()\[\]{}<>\""
_WORDS = re.compile(rf"(?:[^\s,.{_ALONE}]|,(?=\d)|\.(?![\s.]|$))+|\.{{2,}}|[,.{_ALONE}]")


def without_marks(text: str) -> str:
    """In lower case, without marks and outer space; what else there is, inner space too, stays."""
    return text.lower().strip().translate(_MARKS)


def segments(text: str) -> list[str]:
    """Han characters one by one, the rest by words; marks left out, also within a word.

    The official script cuts the rest with NLTK's word tokenizer, and this much as it does: at
    space and brackets, at stops and commas unless within a number or a word. NLTK also parts
    contractions ("it's", "don't") and single quotation marks, and leaves the stop on
    abbreviations ("Mr. Li").
    """
    units: list[str] = []
    for part in _HAN.split(without_marks(text)):
        units += [part] if _HAN.match(part) else _WORDS.findall(part)
    return units


def cmrc_exact(prediction: str, answer: str) -> float:
    """1 where both are the same without marks, else 0."""
    return float(without_marks(prediction) == without_marks(answer))


def cmrc_overlap(prediction: str, answer: str) -> float:
    """F1 of the longest run of segments that both texts contain, in 0..1; 0 where either is
    empty. (The script's "longest common string": in one piece, not a subsequence.)"""
    ours, theirs = segments(prediction), segments(answer)
    match = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match()
    return 2 * match.size / (len(ours) + len(theirs)) if match.size else 0.0


def cmrc(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """average, f1, exact, total, skipped, by the official cmrc2018_evaluate.py (Cui et al. 2019),
    which also scores DRCD. The average is that of F1 and exact match."""
    _all_answerable(references)
    f1 = mean(_best_of_each(predictions, references, cmrc_overlap))
    same = mean(_best_of_each(predictions, references, cmrc_exact))
    totals = _totals(predictions, references)
    return {"average": (f1 + same) / 2, "f1": f1, "exact": same, **totals}


# All -------------------------------------------------------------------------------------------


def _best_of_each(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], measure: Measure
) -> npt.NDArray[np.float64]:
    """(questions,): the best score over each one's answers; 0 without a prediction."""
    best = [
        max(measure(predictions[name], answer) for answer in answers)
        if name in predictions
        else 0.0
        for name, answers in references.items()
    ]
    return np.array(best, np.float64)


def _all_answerable(references: Mapping[str, Sequence[str]]) -> None:
    for name, answers in references.items():
        if not answers:
            raise UserError(f'question "{name}" has no answer; squad2 (SQuAD 2.0) knows such')


def _totals(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    return {
        "total": len(references),
        "skipped": sum(name not in predictions for name in references),
    }
