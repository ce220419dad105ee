"""Options of `palm-ds pretrain` and `finetune` that are keys of a recipe."""

from __future__ import annotations

import argparse

import pytest

from palm_ds.cli.train import _overrides
from palm_ds.common.config import parse_override


@pytest.mark.parametrize(
    "name", ["2026-11-29", "2024_01", "0123", "runs/a #2", "yes", 'a "b": c\\d', "[x]", "ü 中 😀"]
)
def test_a_path_is_a_text_whatever_yaml_would_read(name: str) -> None:
    """2024_01 was the number 202401, and what follows a # was lost."""
    args = argparse.Namespace(overrides=["seed=2"], init_from=name, extend=None)
    assert dict(map(parse_override, _overrides(args))) == {"seed": 2, "init_from": name}
