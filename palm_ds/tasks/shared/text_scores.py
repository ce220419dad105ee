"""Scores of written texts against the texts that were wanted, by one of several rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Literal

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.answers import squad_v1
from palm_ds.tasks.metrics.texts import bleu, distinct, rouge_l, rouge_n, stemmed, words

TextRules = Literal["rouge", "rouge_stemmed", "bleu", "dialogue", "answers"]


def check_rules(rules: TextRules, where: str) -> None:
    """Raises UserError if a package that they need is missing."""
    if rules == "rouge_stemmed" and find_spec("nltk") is None:
        raise UserError(
            f"{where}.score: rouge_stemmed needs nltk: pip install 'palm_ds[metrics]'; rouge does "
            "not"
        )


def text_scores(
    rules: TextRules, predictions: Sequence[str], targets: Sequence[str]
) -> dict[str, float]:
    """{metric: value in 0..1}, the main one first."""
    return _RULES[rules](predictions, targets)


def _overlap(
    predictions: Sequence[str],
    targets: Sequence[str],
    *,
    bleu_first: bool = False,
    stems: bool = False,
) -> dict[str, float]:
    predicted, wanted = [words(text) for text in predictions], [[words(text)] for text in targets]
    one, other = predicted, wanted
    if stems:
        one, other = (
            [stemmed(x) for x in predicted],
            [[stemmed(x) for x in each] for each in wanted],
        )
    rouge = {
        "rouge_l": rouge_l(one, other),
        "rouge_1": rouge_n(one, other, 1),
        "rouge_2": rouge_n(one, other, 2),
    }
    own = {"bleu_4": bleu(predicted, wanted)}
    return own | rouge if bleu_first else rouge | own


def _dialogue(predictions: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    predicted, wanted = [words(text) for text in predictions], [[words(text)] for text in targets]
    return {
        "bleu_1": bleu(predicted, wanted, 1),
        "bleu_2": bleu(predicted, wanted, 2),
        "distinct_1": distinct(predicted, 1),
        "distinct_2": distinct(predicted, 2),
    }


def _answers(predictions: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    scores = squad_v1(
        {str(i): text for i, text in enumerate(predictions)},
        {str(i): [text] for i, text in enumerate(targets)},
    )
    return {name: scores[name] for name in ("f1", "exact")}


_RULES: dict[str, Callable[[Sequence[str], Sequence[str]], dict[str, float]]] = {
    "rouge": _overlap,
    "rouge_stemmed": partial(_overlap, stems=True),
    "bleu": partial(_overlap, bleu_first=True),
    "dialogue": _dialogue,
    "answers": _answers,
}
