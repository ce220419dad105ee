"""The settings of the optimizer."""

from __future__ import annotations

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kind": "adam"}, 'optimizer.kind: no "adam"; did you mean "adamw"\\? \\(or module.Class'),
        (
            {"options": {"a": 1}},
            "optimizer.options: only for a custom optimizer .*; adamw has `betas` and `eps`",
        ),
        (
            {"kind": "a.B", "eps": 1.0},
            "optimizer.eps: not used by a.B; set it in",
        ),
        (
            {"kind": "muon", "options": {"momentun": 0.9}},
            'optimizer.options.momentun: unknown key; did you mean "momentum"',
        ),
        (
            {"kind": "muon", "options": {"adjust_lr": "spectral"}},
            "optimizer.options.adjust_lr: .*match_rms_adamw",
        ),
        (
            {"kind": "muon", "options": {"momentum": 1.0}},
            r"optimizer.options.momentum: expected a number below 1, got 1.0",
        ),
        ({"lr": 0.0}, "lr: expected a number above 0, got 0.0"),
        ({"betas": (0.9, 1.0)}, r"betas.1: expected a number below 1, got 1.0"),
        ({"clip": -1.0}, "clip: expected 0 or more, got -1.0"),
        ({"weight_decay": -0.1}, "weight_decay: expected 0 or more, got -0.1"),
        ({"fgm": -0.1}, "fgm: expected 0 or more, got -0.1"),
        ({"layer_decay": 0.0}, r"layer_decay: expected a number above 0, got 0.0"),
        ({"layer_decay": 1.1}, r"layer_decay: expected at most 1, got 1.1"),
        ({"ema": 1.0}, r"ema: expected a number below 1, got 1.0"),
    ],
)
def test_invalid_settings_are_errors(values: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        OptimizerConfig(**values)  # type: ignore[arg-type]
