"""Which metrics are shown in per cent."""

from __future__ import annotations

import pytest

from palm_ds.tasks.metrics.units import is_fraction, shown, title


@pytest.mark.parametrize(
    "name",
    [
        *("accuracy", "matthews", "f1 PER", "ndcg@10", "best_f1", "has_answer_exact"),
        *("no_answer_f1", "text_recall@5", "soft_accuracy"),
    ],
)
def test_fractions(name: str) -> None:
    assert is_fraction(name)
    assert (title(name), shown(name, 0.5)) == (f"{name} %", "50.00")


@pytest.mark.parametrize(
    "name", ["mse", "rmse", "perplexity", "loss", "best_f1_threshold", "pn_ratio", "mine"]
)
def test_metrics_in_other_units(name: str) -> None:
    assert not is_fraction(name)
    assert (title(name), shown(name, 0.5)) == (name, "0.5000")
