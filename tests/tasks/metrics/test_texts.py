"""BLEU equals sacrebleu's, ROUGE equals rouge-score's."""

from __future__ import annotations

import math
import random

import pytest

from palm_ds.tasks.metrics.texts import (
    bleu,
    distinct,
    longest_common,
    rouge_l,
    rouge_n,
    stemmed,
    words,
)
from palm_ds.tasks.shared.text_scores import text_scores

VOCABULARY = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "quickly",
    "running",
    "cats",
    "and",
]


class OurWords:
    """A tokenizer for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


def texts(count: int, seed: int, longest: int = 14) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(VOCABULARY, k=rng.randint(0, longest))) for _ in range(count)]


def as_words(references: list[list[str]]) -> list[list[list[str]]]:
    return [[words(text) for text in accepted] for accepted in references]


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 5, 60])
def test_bleu_equals_sacrebleu(order: int, count: int) -> None:
    import sacrebleu

    for seed in range(10):
        found = texts(count, seed)
        streams = [texts(count, 100 + seed), texts(count, 200 + seed)]
        references = [list(accepted) for accepted in zip(*streams, strict=True)]
        scorer = sacrebleu.BLEU(max_ngram_order=order, tokenize="none", force=True)
        wanted = scorer.corpus_score(found, streams).score / 100
        own = bleu([words(text) for text in found], as_words(references), order)
        assert own == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("stems", [False, True])
def test_rouge_equals_rouge_score(stems: bool) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=stems)
    found, references = texts(80, 1), [texts(3, seed) for seed in range(80)]
    single = [[accepted[0]] for accepted in references]
    for given in (single, references):
        each = [scorer.score_multi(a, text) for a, text in zip(given, found, strict=True)]
        wanted = {name: sum(one[name].fmeasure for one in each) / len(each) for name in each[0]}
        split, accepted = [words(text) for text in found], as_words(given)
        if stems:
            split = [stemmed(text) for text in split]
            accepted = [[stemmed(text) for text in each] for each in accepted]
        assert rouge_n(split, accepted, 1) == pytest.approx(wanted["rouge1"], abs=1e-12)
        assert rouge_n(split, accepted, 2) == pytest.approx(wanted["rouge2"], abs=1e-12)
        assert rouge_l(split, accepted) == pytest.approx(wanted["rougeL"], abs=1e-12)


def test_stemmed_rouge_is_a_rule_of_its_own() -> None:
    given = ["the cats were sitting quietly"], ["the cat was sitting quiet"]
    plain, stems = text_scores("rouge", *given), text_scores("rouge_stemmed", *given)
    assert (plain["rouge_1"], stems["rouge_1"]) == (2 / 5, 3 / 5)
    assert plain["bleu_4"] == stems["bleu_4"]


def test_chinese_is_compared_by_characters() -> None:
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    found, reference = "今天天气很好,我们出去。", "今天 天气不好，我们不出去"
    scorer = RougeScorer(["rouge1", "rougeL"], tokenizer=OurWords())
    wanted = scorer.score(reference, found)
    split = [words(found)], [[words(reference)]]
    assert rouge_n(*split, 1) == pytest.approx(wanted["rouge1"].fmeasure)
    assert rouge_l(*split) == pytest.approx(wanted["rougeL"].fmeasure)
    by_sacrebleu = sacrebleu.corpus_bleu([found], [[reference]], tokenize="zh").score / 100
    assert bleu(*split) == pytest.approx(by_sacrebleu)


def test_longest_common_subsequence_by_the_table() -> None:
    for seed in range(40):
        one, other = (words(text) for text in texts(2, seed, 90))
        row = [0] * (len(other) + 1)
        for word in one:
            above = row[:]
            for j, each in enumerate(other):
                row[j + 1] = above[j] + 1 if word == each else max(above[j + 1], row[j])
        assert longest_common(one, other) == row[-1]


def test_distinct_ngrams() -> None:
    found = [words("a b a"), words("b a"), []]
    assert distinct(found, 1) == 2 / 5
    assert distinct(found, 2) == 2 / 3  # "a b" and "b a" twice
    assert distinct([[]], 2) == 0.0


def test_nothing_to_score() -> None:
    assert all(math.isnan(x) for x in (bleu([], []), rouge_l([], []), distinct([], 1)))
