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
            r"optimizer.options.momentum: must be in \[0, 1\), got 1.0",
        ),
        ({"lr": 0.0}, "optimizer.lr: must be above 0, got 0.0"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas: each must be in \[0, 1\), got \[0.9, 1.0\]"),
        ({"clip": -1.0}, "optimizer.clip: must not be negative"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay: must not be negative"),
        ({"fgm": -0.1}, "optimizer.fgm: must not be negative"),
        ({"layer_decay": 0.0}, r"optimizer.layer_decay: must be in \(0, 1\], got 0.0"),
        ({"layer_decay": 1.1}, r"optimizer.layer_decay: must be in \(0, 1\], got 1.1"),
        ({"ema": 1.0}, r"optimizer.ema: must be in \[0, 1\), got 1.0"),
    ],
)
def test_invalid_settings_are_errors(values: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        OptimizerConfig(**values)  # type: ignore[arg-type]
