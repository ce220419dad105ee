"""`palm-ds suite` with shipped recipes by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.cli.suite import _with_shipped
from palm_ds.common.errors import UserError
from palm_ds.train.sweeps.suite import Suite


def test_a_suite_may_name_shipped_recipes(root: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("")
    rte = str(root / "launch/recipes/finetune/rte.yaml")
    assert _with_shipped(Suite(recipes=["rte", "own.yaml"])).recipes == [rte, "own.yaml"]
    named = _with_shipped(Suite(recipes={"first": "finetune/rte.yaml"}))
    assert named.recipes == {"first": rte} and named.template == ""
    with pytest.raises(UserError, match=r"ret\.yaml: no such file, and no shipped recipe"):
        _with_shipped(Suite(template="ret.yaml", data="x"))
