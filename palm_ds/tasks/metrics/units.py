"""Display units of metrics: fractions of 1 in per cent, all others unchanged; and which of them
should be low.

shown("accuracy", 0.912)  "91.20"        title("accuracy")  "accuracy %"
shown("mse", 0.0312)      "0.0312"       title("mse")       "mse"
"""

from __future__ import annotations

import re

_FRACTIONS = (
    *("accuracy", "auc", "precision", "recall", "exact", "exact_match", "average", "matthews"),
    *("f1", "macro_f1", "micro_f1", "acc_and_f1", "mrr", "map", "ndcg"),
    *("pearson", "spearman", "pearson_and_spearman", "cosine"),
    *("recall_at_precision", "precision_at_threshold", "soft_accuracy"),
    *("rouge_l", "rouge_1", "rouge_2", "bleu_1", "bleu_2", "bleu_4", "distinct_1", "distinct_2"),
)
_PARTS = re.compile(r"^(?:best|has_answer|no_answer|text|image)_|[@ ].*$")
"""Prefixes of subsets and of what is found; suffixes at k and by type."""


_LESS_IS_BETTER = ("loss", "mse", "rmse", "mae", "perplexity")
_NEGATED = ("neg_", "negative_", "minus_")
"""Of errors whose sign is changed, as in scikit-learn's neg_mean_squared_error."""


def less_is_better(name: str) -> bool:
    """Whether the lowest value of a metric is the best. Functions of scikit-learn that end with
    _error or _loss are such."""
    if name.startswith(_NEGATED):
        return False
    return name in _LESS_IS_BETTER or name.endswith(("_error", "_loss"))


def is_fraction(name: str) -> bool:
    """Whether a metric is in 0..1 (correlations: -1..1). False for unknown metrics."""
    return _PARTS.sub("", name) in _FRACTIONS


def title(name: str) -> str:
    """Name of the metric with its unit."""
    return f"{name} %" if is_fraction(name) else name


def shown(name: str, value: float) -> str:
    """The value in the unit of the metric."""
    return f"{100 * value:.2f}" if is_fraction(name) else f"{value:.4f}"
