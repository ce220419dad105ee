"""Keywords that are fields of a dataclass are in signatures, docstrings and the eyes of pyright."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import palm_ds as palm
from palm_ds.api.keywords import EmbeddingKeywords, TrainKeywords
from palm_ds.api.train_settings import TrainSettings
from palm_ds.common.keywords import descriptions, documents, documents_own_fields
from palm_ds.inference.embedder import EmbeddingSettings
from tests.helpers.own_task import HowMany


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    name: str
    size: int = 3
    """How many
    there are."""
    found: dict[str, int] = dataclasses.field(default_factory=dict)

    @documents_own_fields(without=("name",), aliases={"amount": "size"})
    @classmethod
    def on(cls, *, rows: int = 0, **settings: Any) -> Any:
        """Makes one."""
        return cls, rows, settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(Base):
    size: int = 4
    more: str = ""
    """Something else."""


def test_a_class_method_has_the_fields_of_the_class_it_is_called_on() -> None:
    shown = inspect.signature(Derived.on).parameters
    assert list(shown) == ["rows", "size", "found", "more", "amount"]
    assert (shown["size"].default, shown["found"].default, shown["amount"].default) == (4, {}, 4)
    assert all(each.kind is each.KEYWORD_ONLY for each in shown.values())
    assert list(inspect.signature(Base.on).parameters) == ["rows", "size", "found", "amount"]
    assert inspect.getdoc(Derived.on) == (
        "Makes one.\n\nsize: How many there are.\nmore: Something else."
    )
    assert Derived.on(rows=1, more="x") == (Derived, 1, {"more": "x"})
    assert Derived(name="a").on() == (Derived, 0, {})


def test_a_function_and_a_class_without_source() -> None:
    @documents(Base)
    def make(where: str, size: int = 1, **settings: Any) -> None:
        pass

    assert list(inspect.signature(make).parameters) == ["where", "size", "name", "found"]
    made = dataclasses.make_dataclass("Made", [("x", int, 1)])
    assert descriptions(made) == {}


PUBLIC: dict[str, tuple[Callable[..., Any], type]] = {
    "Trainer": (palm.Trainer, TrainSettings),
    "MultiHeadTrainer": (palm.MultiHeadTrainer, TrainSettings),
    "Backbone()": (palm.Backbone.__call__, EmbeddingSettings),
    "LoadedModel.embed": (palm.LoadedModel.embed, EmbeddingSettings),
    "a task of the user's own": (HowMany.on, HowMany),
    **{f"tasks.{x}": (getattr(palm.tasks, x).on, getattr(palm.tasks, x)) for x in dir(palm.tasks)},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_constructor_shows_and_explains_its_keywords(name: str) -> None:
    function, settings = PUBLIC[name]
    shown = inspect.signature(function).parameters
    doc = inspect.getdoc(function.__init__ if inspect.isclass(function) else function) or ""
    assert not any(each.kind is each.VAR_KEYWORD for each in shown.values())
    for field in dataclasses.fields(settings):
        if field.name not in ("name", "source"):
            assert field.name in shown, field.name
            assert f"{field.name}: " in doc or settings is HowMany, field.name


@pytest.mark.parametrize(
    ("typed", "settings"),
    [(TrainKeywords, TrainSettings), (EmbeddingKeywords, EmbeddingSettings)],
)
def test_typed_keywords_are_the_fields(typed: Any, settings: type) -> None:
    assert list(typed.__annotations__) == [field.name for field in dataclasses.fields(settings)]
    assert not typed.__required_keys__


PROGRAM = """
import palm_ds as palm

task = palm.tasks.Classification.on(train=["a"], dev="dev.tsv", class_weights={"a": 2.0})
trainer = palm.Trainer(task, backbone="x", batch=8, gradient_checkpointing=True)
found: list[dict] = trainer.predict([("a", "b")])["classification"]
model = palm.load("runs/mine")
model.embed(["a"], pooling="cls", layers=1)
palm.tasks.Classification.on(smothing=0.1)  # 9
palm.tasks.Clasification  # 10
palm.tasks.Tagging.on(crf="yes")  # 11
palm.Trainer(task, epoch=3)  # 12
palm.MultiHeadTrainer([task], batch="8")  # 13
palm.Backbone.from_pretrained("x")("a", poling="cls")  # 14
model.embed(["a"], normalise=True)  # 15
"""


@pytest.mark.slow
def test_pyright_completes_and_checks_them(tmp_path: Path) -> None:
    """It reports the misspelled and mistyped keywords of a program, and nothing else."""
    pytest.importorskip("pyright")
    (tmp_path / "program.py").write_text(PROGRAM)
    where = {"extraPaths": [str(Path(palm.__file__).parents[1])], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(where))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not start: {done.stderr[-200:]}")
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = [each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"]
    assert lines == list(range(9, 16)), found
