"""Keywords that are fields of a dataclass are in signatures, docstrings and the eyes of pyright."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import palm_ds as palm
from palm_ds.api.keywords import EmbeddingKeywords, TrainKeywords
from palm_ds.api.train_settings import TrainSettings
from palm_ds.common.keywords import descriptions, documents
from palm_ds.inference.embedder import EmbeddingSettings
from tests.helpers.own_task import HowMany


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    name: str
    size: int = 3
    """How many
    there are."""
    found: dict[str, int] = dataclasses.field(default_factory=dict)


def test_a_function_and_a_class_without_source() -> None:
    @documents(Base)
    def make(where: str, size: int = 1, **settings: Any) -> None:
        pass

    assert list(inspect.signature(make).parameters) == ["where", "size", "name", "found"]
    shown = inspect.signature(make).parameters
    assert (shown["size"].default, shown["found"].default) == (1, {})
    assert shown["name"].default is inspect.Parameter.empty
    assert inspect.getdoc(make) == "size: How many there are."
    made = dataclasses.make_dataclass("Made", [("x", int, 1)])
    assert descriptions(made) == {}


PUBLIC: dict[str, tuple[Callable[..., Any], type]] = {
    "Trainer": (palm.Trainer, TrainSettings),
    "MultiHeadTrainer": (palm.MultiHeadTrainer, TrainSettings),
    "Backbone()": (palm.Backbone.__call__, EmbeddingSettings),
    "LoadedModel.embed": (palm.LoadedModel.embed, EmbeddingSettings),
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
            assert f"{field.name}: " in doc, field.name


TASKS = [*(getattr(palm.tasks, name) for name in dir(palm.tasks)), HowMany]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_its_fields_and_on_has_few_keywords(task: type[palm.Task]) -> None:
    """Both are what the source says, so that every editor has them."""
    shown = inspect.signature(task).parameters
    assert list(shown) == [field.name for field in dataclasses.fields(task)]
    assert {each.kind for each in shown.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert task().settings() == {}
    for of in (task.on, task().on):
        assert list(inspect.signature(of).parameters) == (
            ["train", "dev", "name", "columns", "read", "mix_ratio", "pass_examples"]
        )
    assert "rows to train and evaluate on" in str(inspect.getdoc(task.on))


def test_settings_of_a_task_are_those_of_a_recipe() -> None:
    """Sequences and sets of keys, too; one task takes several data."""
    task = palm.tasks.Classification(labels=["no", "yes"], smoothing=0.1, name="mood")
    assert task.on(train=["a"]).entry("rows") == {
        "kind": "classification",
        "source": "rows",
        "labels": ["no", "yes"],
        "smoothing": 0.1,
    }
    assert task.on(train=["a"]).name == "mood" and task.on(train=["a"], name="x").name == "x"
    assert dataclasses.replace(task, smoothing=0.0).settings() == {"labels": ["no", "yes"]}
    assert pickle.loads(pickle.dumps(task)) == task
    settings = palm.DecodingSettings(beams=4)
    generate = palm.tasks.Generation(generate=settings).settings()["generate"]
    assert generate == dataclasses.asdict(settings)


def test_every_task_is_imported_for_editors() -> None:
    tree = ast.parse(Path(palm.tasks.__file__).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("palm_ds.tasks.")
        for alias in node.names
    }
    assert imported == set(dir(palm.tasks))


@pytest.mark.parametrize(
    ("typed", "settings"),
    [(TrainKeywords, TrainSettings), (EmbeddingKeywords, EmbeddingSettings)],
)
def test_typed_keywords_are_the_fields(typed: Any, settings: type) -> None:
    assert list(typed.__annotations__) == [field.name for field in dataclasses.fields(settings)]
    assert not typed.__required_keys__


PROGRAM = """
import palm_ds as palm

mood = palm.tasks.Classification(labels=["a", "b"], class_weights={"a": 2.0})
task: palm.TaskWithData = mood.on(train=["a"], dev="dev.tsv")
palm.tasks.Generation(generate=palm.DecodingSettings(beams=4)).on(train="train.tsv")
trainer = palm.Trainer(task, backbone="x", batch=8, gradient_checkpointing=True)
found: list[dict] = trainer.predict([("a", "b")])["classification"]
model = palm.load("runs/mine")
model.embed(["a"], pooling="cls", layers=1)
palm.tasks.Classification(smothing=0.1)  # 11
palm.tasks.Clasification  # 12
palm.tasks.Tagging(crf="yes")  # 13
palm.tasks.Tagging.on(trian="train.tsv")  # 14
palm.tasks.Tagging().on(mix_ratio="2")  # 15
palm.Trainer(task, epoch=3)  # 16
palm.MultiHeadTrainer([task], batch="8")  # 17
palm.Backbone.from_pretrained("x")("a", poling="cls")  # 18
model.embed(["a"], normalise=True)  # 19
"""


@pytest.mark.slow
@pytest.mark.exhaustive  # `make lint` checks the file of keywords
def test_pyright_completes_and_checks_them(tmp_path: Path) -> None:
    """It reports the misspelled and mistyped keywords of a program, and nothing else."""
    pytest.importorskip("pyright")
    (tmp_path / "program.py").write_text(PROGRAM)
    where = {
        "extraPaths": [str(Path(palm.__file__).parents[1])],
        "typeCheckingMode": "standard",
        "useLibraryCodeForTypes": False,
    }
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
    assert lines == list(range(11, 20)), found
