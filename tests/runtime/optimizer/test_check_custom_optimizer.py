"""The check of custom optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.optimizer.check_custom_optimizer import checked_optimizer_class

MODULE = "tests.helpers.own_optimizer."


def tried(kind: str, stage: int = 2, *, decays: bool = True, **options: Any) -> Any:
    name = f"torch.optim.{kind}" if hasattr(torch.optim, kind) else f"{MODULE}{kind}"
    return checked_optimizer_class(name, options, decays=decays, zero_stage=stage)[1]


@pytest.mark.parametrize(
    ("kind", "options", "moments"),
    [
        ("Lion", {}, {"mean"}),
        ("Lion", {"betas": [0.5, 0.9]}, {"mean"}),
        ("SGD", {}, set()),
        ("SGD", {"momentum": 0.9, "nesterov": True}, {"momentum_buffer"}),
        ("RMSprop", {"momentum": 0.9}, {"square_avg", "momentum_buffer"}),
        ("AdamW", {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        ("Adadelta", {}, {"square_avg", "acc_delta"}),
    ],
)
def test_element_wise_optimizers_are_accepted(kind, options, moments) -> None:
    kept = tried(kind, **options)
    assert kept.moments.keys() == moments and kept.from_zero
    entry = kept.entry(torch.ones(3))
    assert int(entry["step"]) == 0 and entry.keys() == {"step", *moments}


def test_the_first_step_may_differ() -> None:
    assert not tried("SGD", momentum=0.9, dampening=0.5).from_zero


def test_optimizers_that_need_whole_parameters_run_under_zero_0_only() -> None:
    assert tried("OfWhole", 0, decays=False).moments.keys() == {"mean"}
    with pytest.raises(UserError, match="OfWhole: the update of a value depends .* ZeRO 1 cuts"):
        tried("OfWhole", 1, decays=False)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("Nothing", {}, "has no 'Nothing'"),
        ("Lion.Inner", {}, "cannot import 'tests.helpers.own_optimizer.Lion'"),
        ("Lion", {"beta": 1}, 'options.beta: unknown key; did you mean "betas"'),
        ("Lion", {"lr": 1}, "options.lr: not an option"),
        ("Lion", {"params": 1}, "options.params: not an option"),
        ("Needs", {}, "options.rho: missing; it must be given"),
        ("Early", {}, "creates its state in its constructor"),
        ("Adagrad", {}, "creates its state in its constructor"),
        ("Rows", {}, r"its state 'row' of a parameter is of shape \(6,\)"),
        ("Adafactor", {}, "its state 'row_var' of a parameter"),
        ("NAdam", {}, r"its state 'mu_product' of a parameter is of shape \(\)"),
        ("Aside", {}, "does not resume exactly"),
        ("OwnRate", {}, r"ignores the learning rate; .*group\[.lr.\]"),
        ("NoDecay", {}, "set optimizer.weight_decay to 0"),
        ("Broken", {}, "fails in a trial: IndexError: first line$"),
        ("Still", {}, "its steps change nothing"),
        ("LBFGS", {}, "fails in a trial: TypeError: .*closure"),
        ("SGD", {"momentum": -1}, "ValueError: Invalid momentum value: -1"),
    ],
)
def test_violations_are_one_line_errors(kind, options, expected) -> None:
    decays = kind not in ("Aside", "OwnRate")  # which they would be refused for first
    with pytest.raises(UserError, match=f"^optimizer.*{expected}") as error:
        tried(kind, decays=decays, **options)
    assert "\n" not in str(error.value)
