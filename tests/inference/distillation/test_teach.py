"""Stored scores teach what the teacher itself would, and belong to what they were written for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.distillation.teach import TeachSummary, teach
from palm_ds.inference.parts import OutputParts
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.runtime.processes.processes import start
from palm_ds.text.tokenizer import wordpiece
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.report.metrics_file import FILE, read_metrics
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import open_data
from palm_ds.train.teachers.distillation_plan import resolve_teachers
from palm_ds.train.teachers.stored_scores import StepScores
from palm_ds.train.train import train
from tests.helpers.saved_model import TITLE, recipe_of, save_model
from tests.helpers.text_tables import SPECIALS, WORDS

TASKS = {
    "mood": {"kind": "classification", "source": "texts"},
    "topic": {"kind": "multi_label", "source": "texts", "label_column": "label_topic"},
    "choice": {"kind": "multiple_choice", "source": "choices"},
    "words": {"kind": "masked_words", "source": "texts"},
    "titles": TITLE,
}
BY_ROWS = ("mood", "topic", "choice")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), stages=tuple(TASKS), tasks=TASKS)


def student(folder: Path, tasks: tuple[str, ...], **teacher: Any) -> Recipe:
    values = recipe_of(folder).resolved()
    values["backbone"] |= {"hidden_size": 8, "num_layers": 1}
    values["tasks"] = {name: values["tasks"][name] for name in tasks}
    used = {task["source"] for task in values["tasks"].values()}
    values["sources"] = {name: values["sources"][name] for name in used}
    logits = {"temperature": 2.0, "top_k": 5}
    values |= {"stages": [dict.fromkeys(tasks, 3)], "log": {"every": 1}, "held_out": 0.0}
    values["export_onnx"] = []
    values["teacher"] = {"path": str(folder), "logits": logits, **teacher}
    return make_recipe(values)


def write(recipe: Recipe, file: Path) -> TeachSummary:
    ds_config = DSConfig(path="", sections={}, stage=0, precision="fp32")
    return teach(recipe, file, ds_config=ds_config, processes=start(ds_config))


def losses(recipe: Recipe, folder: Path) -> list[dict[str, float]]:
    machine = make_ds_config({"train_micro_batch_size_per_gpu": 2})
    assert train(RunSpec(recipe=recipe, ds_config=machine, folder=folder)) == 0
    return [step["loss"] for step in read_metrics(folder / FILE).steps]


@pytest.mark.parametrize(
    ("tasks", "by"),
    [
        (BY_ROWS, "rows of tables"),
        (("mood", "topic", "choice", "words"), "rows of steps"),
        (("titles",), "rows of steps"),
    ],
)
def test_stored_scores_give_the_same_losses(folder, tmp_path, tasks, by) -> None:
    """Of masked words the same few tokens are kept."""
    file = tmp_path / "scores.parquet"
    assert write(student(folder, tasks), file).by == by
    online = losses(student(folder, tasks), tmp_path / "online")
    stored = losses(student(folder, tasks, file=str(file)), tmp_path / "stored")
    assert len(online) == len(stored) >= 3
    for mine, its in zip(stored, online, strict=True):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)
    seen = {name for step in online for name in step}
    assert {f"teacher.{name}" for name in tasks} <= seen


def test_scores_of_steps_are_read_group_by_group(folder, tmp_path, monkeypatch) -> None:
    """In the order of the steps, and each once, however many micro-batches a step has."""
    monkeypatch.setattr("palm_ds.inference.distillation.teach._STEPS", 2)
    file, tasks = tmp_path / "scores.parquet", ("mood", "words")
    assert write(student(folder, tasks), file).parts >= 3
    read, original = [], StepScores._read

    def noted(scores: StepScores, number: int) -> Any:
        read.append(number)
        return original(scores, number)

    monkeypatch.setattr(StepScores, "_read", noted)
    online = losses(student(folder, tasks), tmp_path / "online")
    stored = losses(student(folder, tasks, file=str(file)), tmp_path / "stored")
    assert read == list(range(pq.read_metadata(file).num_row_groups))
    for mine, its in zip(stored, online, strict=True):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("task", ["mood", "words"])
def test_a_flipped_bit_of_a_score_is_one_line(folder, tmp_path, task) -> None:
    file = tmp_path / "scores.parquet"
    write(student(folder, (task,)), file)
    column = pq.read_schema(file).names.index(task)
    page = pq.read_metadata(file).row_group(0).column(column).data_page_offset
    data = bytearray(file.read_bytes())
    data[page + 60] ^= 16
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"scores\.parquet: is not a parquet file, or damaged: "):
        losses(student(folder, (task,), file=str(file)), tmp_path / "run")


def test_an_interrupted_command_continues(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("palm_ds.inference.distillation.teach._ROWS", 5)
    file, recipe = tmp_path / "scores.parquet", student(folder, ("mood",))
    write(recipe, file)
    whole = pq.read_table(file)
    calls = []

    def interrupted(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(*arguments, **options)

    original = pq.write_table
    monkeypatch.setattr("palm_ds.inference.distillation.teach.pq.write_table", interrupted)
    again = tmp_path / "again.parquet"
    with pytest.raises(KeyboardInterrupt):
        write(recipe, again)
    assert not again.exists()
    found = write(recipe, again)
    assert (found.parts, found.continued, found.rows) == (3, 1, 12)
    assert pq.read_table(again).equals(whole) and not list(tmp_path.glob(".again*"))


def interrupted(recipe: Any, file: Path) -> int:
    """Write all parts, but not the file; returns the rows of the parts."""
    rows = []

    def join(parts: OutputParts, *_: object) -> None:
        rows.extend(pq.read_metadata(x).num_rows for x in parts.folder.glob("part_*"))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr("palm_ds.inference.distillation.teach._join", join)
        write(recipe, file)
    return sum(rows)


def test_parts_of_another_recipe_are_not_continued(folder, tmp_path) -> None:
    """Here the interrupted command had another maximum length."""
    file = tmp_path / "scores.parquet"
    short = student(folder, ("mood",)).resolved()
    short["tasks"]["mood"]["max_length"] = 8
    assert interrupted(make_recipe(short), file) == 12
    assert write(make_recipe(short), file).continued == 1
    assert interrupted(make_recipe(short), file) == 12
    assert write(student(folder, ("mood",)), file).continued == 0


def test_parts_of_other_rows_are_not_continued(folder, tmp_path) -> None:
    """A part has the first 1,024 rows that are not held out, whichever these are."""
    file = tmp_path / "scores.parquet"
    values = student(folder, ("mood",)).resolved()
    assert 0 < interrupted(make_recipe(values | {"held_out": 0.4}), file) < 12
    found = write(make_recipe(values), file)
    assert (found.continued, found.rows) == (0, 12)


def test_scores_of_fewer_rows_are_refused_at_the_start(folder, tmp_path) -> None:
    file = tmp_path / "scores.parquet"
    values = student(folder, ("mood",)).resolved()
    write(make_recipe(values | {"held_out": 0.4}), file)
    recipe = student(folder, ("mood",), file=str(file))
    with pytest.raises(
        UserError, match=r"has no scores of \d+ rows that are trained on here, such"
    ):
        losses(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_numbers_of_another_scale_are_refused(tmp_path) -> None:
    size = {"kind": "regression", "source": "texts", "label_column": "label_size"}
    folder = save_model(tmp_path / "run", stages=("size",), tasks={"size": size})
    file = tmp_path / "scores.parquet"
    values = student(folder, ("size",)).resolved() | {"held_out": 0.0}
    recipe = make_recipe(values)
    write(recipe, file)
    values["teacher"] |= {"file": str(file)}
    data = open_data(make_recipe(values))
    assert resolve_teachers(resolve(make_recipe(values), data), data).stored
    values["tasks"]["size"]["scale"] = False
    with pytest.raises(UserError, match="'size' have another mean or deviation"):
        resolve_teachers(resolve(make_recipe(values), data), data)


def test_an_extended_run_does_not_use_scores_of_steps(folder, tmp_path) -> None:
    file, recipe = tmp_path / "scores.parquet", student(folder, ("words",))
    write(recipe, file)
    extended = replace(student(folder, ("words",), file=str(file)), extend="another")
    data = open_data(extended)
    with pytest.raises(UserError, match="scores.parquet: an extended run reads on where"):
        resolve_teachers(resolve(extended, data), data)
    with pytest.raises(UserError, match="extend: an extended run reads on where"):
        write(replace(recipe, extend="another"), file)


def test_a_teacher_of_another_vocabulary(folder, tmp_path) -> None:
    """It reads the rows with its own tokenizer; running with the training it is refused."""
    tokenizer = wordpiece([*SPECIALS, *reversed(WORDS)], lower=True)
    other = save_model(tmp_path / "other", stages=("mood",), tokenizer=tokenizer)
    recipe = student(folder, ("mood",), path=str(other))
    with pytest.raises(UserError, match="palm-ds teach"):
        losses(recipe, tmp_path / "run")
    file = tmp_path / "scores.parquet"
    assert write(recipe, file).rows == 12
    assert losses(student(folder, ("mood",), file=str(file)), tmp_path / "run")


def test_a_table_is_not_replaced_by_its_scores(folder) -> None:
    recipe = student(folder, ("mood",))
    file = Path(str(recipe.sources["texts"].table))
    before = file.read_bytes()
    with pytest.raises(UserError, match="is also an input; name another"):
        write(recipe, file)
    assert file.read_bytes() == before


def test_several_processes_or_tokenizers_are_refused(folder, tmp_path) -> None:
    recipe, file = student(folder, ("mood",)), tmp_path / "scores.parquet"
    ds_config = DSConfig(path="", sections={}, stage=0, precision="fp32")
    several: Any = SimpleNamespace(world=2)
    with pytest.raises(UserError, match="runs in one process; start it without a launcher"):
        teach(recipe, file, ds_config=ds_config, processes=several)
    tokenizer = wordpiece([*SPECIALS, *reversed(WORDS)], lower=True)
    other = save_model(tmp_path / "other", stages=("mood",), tokenizer=tokenizer)
    models = {"a": {"path": str(folder)}, "b": {"path": str(other)}}
    with pytest.raises(UserError, match="models with different tokenizers have no mean"):
        write(student(folder, ("mood",), path="", models=models), file)


def test_scores_of_something_else_are_refused(folder, tmp_path) -> None:
    rows, steps = tmp_path / "rows.parquet", tmp_path / "steps.parquet"
    write(student(folder, ("mood",)), rows)
    write(student(folder, ("words",)), steps)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    values = student(folder, ("mood",), file=str(rows)).resolved()
    table = moved / "texts.jsonl"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    values["sources"]["texts"]["table"] = str(table)
    with pytest.raises(UserError, match="for another table than sources.texts"):
        losses(make_recipe(values), tmp_path / "run")
    values = student(folder, ("words",), file=str(steps)).resolved() | {"seed": 9}
    with pytest.raises(UserError, match="written for other steps"):
        losses(make_recipe(values), tmp_path / "run")
    with pytest.raises(UserError, match="has scores for mood, which are not tasks"):
        losses(student(folder, ("words",), file=str(rows)), tmp_path / "run")
    with pytest.raises(UserError, match="is not a parquet file"):
        losses(student(folder, ("mood",), file=str(table)), tmp_path / "run")
    with pytest.raises(UserError, match="no such file"):
        losses(student(folder, ("mood",), file="none.parquet"), tmp_path / "run")
