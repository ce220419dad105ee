from __future__ import annotations

import sys

import pytest

from palm_ds.runtime.deepspeed.deepspeed_import import _without, import_deepspeed


def test_a_package_is_missing_only_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with _without("colorsys"), pytest.raises(ImportError):
        import colorsys
    import colorsys

    with _without("colorsys"):  # nothing to save once it is imported
        import colorsys as again
    assert again is colorsys


def test_the_compiler_of_deepspeed_is_as_before() -> None:
    import_deepspeed()
    import torch
    from deepspeed.runtime import compiler

    assert compiler.compile() is torch.compile
