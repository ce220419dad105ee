"""The starting point of a run, as far as its log tells of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from palm_ds.pretrain.replaced_token_detection import GeneratorSettings, ReplacedTokenDetection
from palm_ds.train.setup import resume


@pytest.mark.parametrize(
    ("init_from", "lines"), [("pair", ["loaded"]), ("other", ["eps", "loaded"])]
)
def test_a_note_on_a_folder_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, init_from: str, lines: Any
) -> None:
    """It was said of `init_from`, then of the generator from the same folder."""
    monkeypatch.setattr(resume, "open_model", lambda path: SimpleNamespace(all_notes=("eps",)))
    monkeypatch.setattr(resume, "load_generator", lambda contents, model, name: "loaded")
    task = ReplacedTokenDetection(source="text", generator=GeneratorSettings(path="pair"))
    recipe: Any = SimpleNamespace(built_tasks={"r": task}, init_from=init_from, extend="")
    model: Any = SimpleNamespace(heads={})
    with caplog.at_level(logging.INFO):
        resume._start_heads(recipe, model, ["heads.r.generator.bias"])
    assert [each.message.rpartition(": ")[2] for each in caplog.records] == lines
