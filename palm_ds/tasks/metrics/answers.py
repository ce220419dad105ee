"""Metrics for text answers: SQuAD 1.1 and 2.0, CMRC2018 and DRCD.

Predictions are {question: text}; references {question: accepted answers}. All scores are means
over the questions in `references`, in 0..1 (the official scripts print per cent), and NaN if there
are none. A question without a prediction counts as wrong and as `skipped`; predictions for other
questions are ignored.
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


def normalized(text: str) -> str:
    """The text in lower case, without ASCII punctuation, English articles and extra spaces."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact(prediction: str, answer: str) -> float:
    """1 if both texts are equal after normalization, else 0."""
    return float(normalized(prediction) == normalized(answer))


def overlap(prediction: str, answer: str) -> float:
    """F1 of the normalized words of two texts, in 0..1; 0 if they share none (SQuAD 1.1)."""
    words, expected = normalized(prediction).split(), normalized(answer).split()
    shared = sum((Counter(words) & Counter(expected)).values())
    return 2 * shared / (len(words) + len(expected)) if shared else 0.0


def overlap_or_none(prediction: str, answer: str) -> float:
    """`overlap`, but 1 if both are empty after normalization: correctly no answer (SQuAD 2.0)."""
    if not normalized(prediction) and not normalized(answer):
        return 1.0
    return overlap(prediction, answer)


def squad_v1(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """f1, exact, total and skipped as in the official evaluate-v1.1.py (Rajpurkar et al. 2016)."""
    _all_answerable(references)
    return {
        "f1": mean(_best_of_each(predictions, references, overlap)),
        "exact": mean(_best_of_each(predictions, references, exact)),
        **_totals(predictions, references),
    }


class Threshold(NamedTuple):
    """The best mean score, and the no-answer odds threshold that achieves it."""

    score: float
    odds: float


def squad_v2(
    predictions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    odds: Mapping[str, float] | None = None,
    threshold: float | None = None,
) -> dict[str, float]:
    """Scores as in the official evaluate-v2.0.py (Rajpurkar et al. 2018): f1, exact, total,
    skipped.

    f1 and exact are also given for questions with an answer (has_answer_*) and without one
    (no_answer_*; their reference is an empty list, the correct prediction an empty text). A group
    without questions is left out.

    odds: that a question has no answer (probabilities or any other scale). Adds best_f1, best_exact
    and their thresholds; `predictions` should then be the best non-empty texts.
    threshold: predictions with higher odds count as empty in all scores but these.

    The official script skips a question without a prediction; here it counts as wrong.
    """
    answerable = np.array([bool(answers) for answers in references.values()], bool)
    accepted = {name: _with_words(answers) for name, answers in references.items()}
    each = {
        "f1": _best_of_each(predictions, accepted, overlap_or_none),
        "exact": _best_of_each(predictions, accepted, exact),
    }
    doubt = None if odds is None else _odds(odds, references)
    silent = np.zeros(len(answerable), bool)
    if threshold is not None:
        if doubt is None:
            raise UserError("`threshold` needs `odds`: the odds that each question has no answer")
        silent = doubt > threshold
    final = {name: np.where(silent, ~answerable, scores) for name, scores in each.items()}
    metrics = {name: mean(scores) for name, scores in final.items()}
    for prefix, which in (("has_answer", answerable), ("no_answer", ~answerable)):
        if which.any():
            metrics |= {f"{prefix}_{name}": mean(scores[which]) for name, scores in final.items()}
            metrics[f"{prefix}_total"] = int(which.sum())
    if doubt is not None and len(doubt):
        for name, scores in each.items():
            best = best_threshold(scores, doubt, answerable)
            metrics |= {f"best_{name}": best.score, f"best_{name}_threshold": best.odds}
    return metrics | _totals(predictions, references)


def best_threshold(
    scores: npt.ArrayLike, odds: npt.ArrayLike, answerable: npt.ArrayLike
) -> Threshold:
    """The lowest threshold with the best mean score over (n,) questions, n > 0.

    scores: score of each prediction if it is given; odds: that there is no answer; answerable:
    bool.

    Follows the official search except for two errors that report scores no threshold achieves: it
    also stops between equal odds, and for an unanswerable question it counts a prediction without
    words ("the") as wrong. If giving no answer at all is best, the official threshold is 0; here it
    is the largest number below the lowest odds.
    """
    odds, answerable = np.asarray(odds, np.float64), np.asarray(answerable, bool)
    order = np.argsort(odds, kind="stable")
    sorted_odds = odds[order]
    # Change of the sum for each further question answered, the most confident first.
    gain = (np.asarray(scores, np.float64) - ~answerable)[order]
    sums = np.concatenate([[0.0], np.cumsum(gain)]) + (~answerable).sum()
    below = np.nextafter(sorted_odds[0], -math.inf)
    stops = np.concatenate([[below], sorted_odds])
    possible = np.append(stops[1:] > stops[:-1], True)  # after the last of equal odds
    at = int(np.argmax(np.where(possible, sums, -math.inf)))
    return Threshold(float(sums[at] / len(odds)), float(stops[at]))


def _with_words(answers: Sequence[str]) -> list[str]:
    """The answers with more than articles and punctuation; if there are none, one empty text."""
    return [text for text in answers if normalized(text)] or [""]


def _odds(
    odds: Mapping[str, float], references: Mapping[str, Sequence[str]]
) -> npt.NDArray[np.float64]:
    for name in references:
        if math.isnan(odds.get(name, math.nan)):
            raise UserError(
                f'question "{name}" has no no-answer odds; `odds` needs one for every question'
            )
    return np.array([odds[name] for name in references], np.float64)


# CMRC2018 and DRCD -----------------------------------------------------------------------------

_MARKS = dict.fromkeys(map(ord, "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"))
"""Marks the official script removes. It also lists ……, but compares single characters."""
_HAN = re.compile("([\u4e00-\u9fa5])")
_SYMBOLS = r";@#$%&?!()\[\]{}<>\""
_WORDS = re.compile(rf"(?:[^\s,.{_SYMBOLS}]|,(?=\d)|\.(?![\s.]|$))+|\.{{2,}}|[,.{_SYMBOLS}]")


def without_marks(text: str) -> str:
    """The text in lower case, without marks and surrounding space; inner space is kept."""
    return text.lower().strip().translate(_MARKS)


def segments(text: str) -> list[str]:
    """Splits text into single Han characters and words; marks are removed, also within a word.

    The official script splits the words with NLTK's tokenizer. This is an approximation: it splits
    at spaces and brackets, and at full stops and commas unless they are inside a number or a word.
    NLTK also splits contractions ("it's", "don't") and single quotation marks, and keeps the full
    stop of abbreviations ("Mr. Li").
    """
    units: list[str] = []
    for part in _HAN.split(without_marks(text)):
        units += [part] if _HAN.match(part) else _WORDS.findall(part)
    return units


def cmrc_exact(prediction: str, answer: str) -> float:
    """1 if both texts are equal without marks, else 0."""
    return float(without_marks(prediction) == without_marks(answer))


def cmrc_overlap(prediction: str, answer: str) -> float:
    """F1 of the longest run of segments in both texts, in 0..1; 0 if either is empty.

    The script's "longest common string" is contiguous, not a subsequence."""
    predicted, expected = segments(prediction), segments(answer)
    match = difflib.SequenceMatcher(None, predicted, expected, autojunk=False).find_longest_match()
    return 2 * match.size / (len(predicted) + len(expected)) if match.size else 0.0


def cmrc(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """average, f1, exact, total and skipped as in the official cmrc2018_evaluate.py (Cui et al.
    2019), which also scores DRCD. `average` is the mean of F1 and exact match."""
    _all_answerable(references)
    f1 = mean(_best_of_each(predictions, references, cmrc_overlap))
    exact_match = mean(_best_of_each(predictions, references, cmrc_exact))
    totals = _totals(predictions, references)
    return {"average": (f1 + exact_match) / 2, "f1": f1, "exact": exact_match, **totals}


# Shared ----------------------------------------------------------------------------------------


def _best_of_each(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], measure: Measure
) -> npt.NDArray[np.float64]:
    """(questions,): the best score over the answers of each question; 0 without a prediction."""
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
            raise UserError(f'question "{name}" has no answer; only squad2 (SQuAD 2.0) allows that')


def _totals(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    return {
        "total": len(references),
        "skipped": sum(name not in predictions for name in references),
    }
