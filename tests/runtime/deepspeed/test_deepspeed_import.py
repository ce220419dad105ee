from __future__ import annotations

import os
import subprocess
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


def test_an_accelerator_that_deepspeed_does_not_know_is_one_line() -> None:
    text = "from palm_ds.common.errors import exit_on_user_error\n"
    text += "from palm_ds.runtime.deepspeed.deepspeed_import import import_deepspeed\n"
    text += "with exit_on_user_error(): import_deepspeed()"
    environment = {**os.environ, "DS_ACCELERATOR": "gpu"}
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said, said
    assert said.startswith("error: DS_ACCELERATOR=gpu: DS_ACCELERATOR must be one of"), said
