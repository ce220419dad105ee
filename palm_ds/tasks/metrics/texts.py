"""Metrics of generated texts: BLEU, ROUGE, distinct n-grams.

Each prediction is compared with one reference or several. Texts are compared word by word, in lower
case; every Chinese character and every punctuation mark is a word of its own (`words`). All scores
are in 0..1, NaN without predictions.

    bleu        Papineni et al. 2002, of all texts together, smoothed as in sacrebleu
    rouge_n, rouge_l    Lin 2004: F1 of n-grams, of the longest common subsequence; mean over texts
    distinct    Li et al. 2016: different n-grams / n-grams, of all texts together
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from palm_ds.data.sources.table import spans_in
from palm_ds.tasks.metrics.counts import mean

Words = Sequence[str]
References = Sequence[Sequence[Words]]
"""For each prediction the texts, as words, that it is compared with."""


def words(text: str) -> list[str]:
    """The words of a text, in lower case.

    >>> words("Don't, 小明!")
    ['don', "'", 't', ',', '小', '明', '!']
    """
    lower = text.lower()
    return [lower[start:end] for start, end in spans_in(lower, "words")]


def stemmed(text: Words) -> list[str]:
    """English words of more than three letters without their endings (Porter 1980), as in
    rouge-score. Needs nltk."""
    from nltk.stem.porter import PorterStemmer

    stem = PorterStemmer().stem
    return [stem(word) if len(word) > 3 else word for word in text]


def ngrams(text: Words, n: int) -> Counter[tuple[str, ...]]:
    """Every n-gram with its count."""
    return Counter(zip(*(text[i:] for i in range(n)), strict=False))


# ---- BLEU ----


def bleu(predictions: Sequence[Words], references: References, n: int = 4) -> float:
    """BLEU of n-grams up to `n`. An order without matches counts as 1/2, 1/4, ... of one, in the
    order in which they occur (Chen and Cherry 2014, method 3), as in sacrebleu."""
    if not predictions:
        return math.nan
    matches, totals = [0] * n, [0] * n
    length = wanted = 0
    for text, accepted in zip(predictions, references, strict=True):
        length += len(text)
        wanted += min((abs(len(answer) - len(text)), len(answer)) for answer in accepted)[1]
        for k in range(n):
            own = ngrams(text, k + 1)
            known: Counter[tuple[str, ...]] = Counter()
            for answer in accepted:
                known |= ngrams(answer, k + 1)
            matches[k] += sum((own & known).values())
            totals[k] += sum(own.values())
    if not all(totals) or not any(matches):
        return 0.0
    brevity = min(1.0, math.exp(1 - wanted / length))
    logs = [math.log(part) for part in _precisions(matches, totals)]
    return brevity * math.exp(sum(logs) / n)


def _precisions(matches: Sequence[int], totals: Sequence[int]) -> list[float]:
    precisions, smoothed = [], 1.0
    for right, total in zip(matches, totals, strict=True):
        if not right:
            smoothed /= 2
        precisions.append((right or smoothed) / total)
    return precisions


# ---- ROUGE ----


def rouge_n(predictions: Sequence[Words], references: References, n: int) -> float:
    """Mean F1 of n-grams; with several references, of the best one."""

    def shared(text: Words, reference: Words) -> float:
        own, known = ngrams(text, n), ngrams(reference, n)
        return _f1(sum((own & known).values()), sum(own.values()), sum(known.values()))

    return _best_mean(predictions, references, shared)


def rouge_l(predictions: Sequence[Words], references: References) -> float:
    """Mean F1 of the longest common subsequence; with several references, of the best one."""

    def shared(text: Words, reference: Words) -> float:
        return _f1(longest_common(text, reference), len(text), len(reference))

    return _best_mean(predictions, references, shared)


def longest_common(one: Words, other: Words) -> int:
    """The length of the longest common subsequence. Bit i of `unmatched`: the row of the
    dynamic program does not grow at i (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(one)) - 1
    unmatched = full
    for word in other:
        hit = unmatched & places.get(word, 0)
        unmatched = ((unmatched + hit) | (unmatched - hit)) & full
    return len(one) - unmatched.bit_count()


def _f1(shared: int, one: int, other: int) -> float:
    return 2 * shared / (one + other) if shared else 0.0


def _best_mean(
    predictions: Sequence[Words], references: References, score: Callable[[Words, Words], float]
) -> float:
    pairs = zip(predictions, references, strict=True)
    return mean([max(score(text, each) for each in accepted) for text, accepted in pairs])


# ---- variety ----


def distinct(predictions: Sequence[Words], n: int) -> float:
    """Different n-grams among all n-grams; 0 if no text has n words."""
    if not predictions:
        return math.nan
    counts: Counter[tuple[str, ...]] = Counter()
    for text in predictions:
        counts.update(ngrams(text, n))
    return len(counts) / counts.total() if counts else 0.0
