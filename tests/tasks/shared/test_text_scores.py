"""Scores of written texts."""

from __future__ import annotations

import pytest

from palm_ds.tasks.metrics.units import is_fraction
from palm_ds.tasks.shared.text_scores import TextRules, text_scores

WRITTEN = ["the cat sat on the mat", "a dog", "今天天气好"]
WANTED = ["The cat sat on a mat", "the dog", "今天天气不好"]


@pytest.mark.parametrize("rules", ["rouge", "bleu", "dialogue", "answers"])
def test_scores_are_fractions_and_one_for_equal_texts(rules: TextRules) -> None:
    scores = text_scores(rules, WRITTEN, WANTED)
    assert all(0 < value <= 1 and is_fraction(name) for name, value in scores.items())
    same = text_scores(rules, WANTED, WANTED)
    own = {name: value for name, value in same.items() if not name.startswith("distinct")}
    assert own == pytest.approx(dict.fromkeys(own, 1.0))


def test_values() -> None:
    rouge = text_scores("rouge", WRITTEN, WANTED)
    assert rouge["rouge_1"] == pytest.approx((5 / 6 + 1 / 2 + 10 / 11) / 3)
    assert text_scores("answers", WRITTEN, WANTED)["exact"] == pytest.approx(
        2 / 3
    )  # without a, the
    assert text_scores("dialogue", ["a b a"], ["a"])["distinct_1"] == pytest.approx(2 / 3)
