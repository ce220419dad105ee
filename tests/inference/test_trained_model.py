"""One run, asked through every door, gives the same weights; each door opens them once."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import BertForMaskedLM

import palm_ds as palm
from palm_ds.cli import convert, embed, fill_mask, predict, show
from palm_ds.common.errors import UserError
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.serve.served_model import ModelOptions, open_served
from palm_ds.train.export import info_of
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import build_model, build_stream
from palm_ds.train.setup.resume import find_starting_point, signature_of
from palm_ds.train.setup.run_folder import RunSpec, check_folder, write_folder
from palm_ds.train.setup.sources import open_data
from palm_ds.train.teachers.distillation_plan import resolve_teachers
from palm_ds.train.teachers.teachers import teachers_of_scores
from palm_ds.train.train import setup_run
from palm_ds.weights import model_folder
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import load_weights, save_weights
from tests.helpers.bert_folder import write_bert
from tests.helpers.saved_model import MORE_TASKS, TASKS, recipe_of, save_model, texts, write_rows
from tests.weights.formats.test_native import flip, save

MACHINE = DSConfig(path="", sections={}, stage=0, precision="fp32")
ALONE: Any = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"), gather=lambda x: [x])
"""The processes of a run of one."""
State = Mapping[str, torch.Tensor]


# ---- runs ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tasks = {
        "mood": {**TASKS["mood"], "task_id": 1},
        "words": {**MORE_TASKS["words"], "task_id": 2},
    }
    backbone = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 64}
    backbone |= {"token_types": 2, "task_types": 4}
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return save_model(folder, ["mood", "words"], tasks=tasks, backbone=backbone)


def checkpoint_of(finished: Path, run: Path, step: int, noise: float = 0.0) -> Path:
    """A checkpoint with the weights of a finished run, or others."""
    recipe = recipe_of(finished)
    data = open_data(recipe)
    model = build_model(recipe, MACHINE, data.vocabulary, device=torch.device("cpu"))
    load_weights(open_model(finished), model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise)
    spec = RunSpec(recipe=recipe, ds_config=MACHINE, folder=run)
    state = {"signature": signature_of(spec, model, data).record()}
    (run / "recipe.yaml").write_text(yaml.safe_dump({**recipe.resolved(), "corpora": {}}))
    return save(run / "checkpoints", model, step=step, state=state)


@pytest.fixture(scope="module")
def unfinished(finished: Path) -> Path:
    """A run whose newest checkpoint is damaged; the one before it has the finished run's
    weights."""
    run = finished.with_name("unfinished")
    run.mkdir()
    checkpoint_of(finished, run, 1, noise=0.3)
    checkpoint_of(finished, run, 2)
    flip(next(checkpoint_of(finished, run, 3, noise=0.3).glob("*.safetensors")))
    return run


@pytest.fixture(scope="module")
def with_best(finished: Path) -> Path:
    """A run whose best/ has the finished run's weights, and its checkpoint others."""
    run = finished.with_name("with_best")
    run.mkdir()
    checkpoint_of(finished, run, 2, noise=0.3)
    shutil.copytree(finished / "weights", run / "best")
    return run


# ---- doors ----


def flat(values: Any) -> list[float]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        return [number for value in values for number in flat(value)]
    return [values] if isinstance(values, float) else []


def said(command: Any, *words: object) -> str:
    stdout = io.StringIO()
    with redirect_stdout(stdout):
        assert command.main([str(word) for word in words]) == 0
    return stdout.getvalue()


def by_predict(path: Path, out: Path) -> State:
    rows = write_rows(out / "rows.jsonl", texts(5, seed=3))
    said(predict.COMMAND, path, "--input", rows, "--output", out / "made", "--tasks", "mood")
    lines = (out / "made/mood.predictions.json").read_text().splitlines()
    return {"mood": torch.tensor([flat(json.loads(line)) for line in lines])}


def by_embed(path: Path, out: Path) -> State:
    (out / "texts.txt").write_text("so good\nso very bad ?\n")
    said(embed.COMMAND, path, "--input", out / "texts.txt", "--output", out / "made.npy")
    return {"vectors": torch.from_numpy(np.load(out / "made.npy"))}


def by_fill_mask(path: Path, out: Path) -> State:
    found = json.loads(said(fill_mask.COMMAND, path, "so [MASK] .", "--json"))
    return {"shares": torch.tensor(flat(found["masks"]))}


def by_serve(path: Path, out: Path) -> State:
    return open_served(path, "mine", ModelOptions()).replicas[0].state_dict()


def by_convert(path: Path, out: Path) -> State:
    said(convert.COMMAND, path, out / "made", "--unchecked")
    assert (out / "made/tokenizer").is_dir()
    return load_file(out / "made/weights.safetensors")


def by_show(path: Path, out: Path) -> State:
    shown = json.loads(said(show.COMMAND, path, "--json"))
    entries = open_model(shown["path"]).entries
    assert set(shown["tensors"]) == set(entries)
    return {name: entry.read() for name, entry in entries.items()}


def by_load(path: Path, out: Path) -> State:
    model = palm.load(path)
    vectors = model.embed(["so good"])
    assert isinstance(vectors, torch.Tensor)
    return {**model.predictor.model.state_dict(), "vectors": vectors}


def by_backbone(path: Path, out: Path) -> State:
    backbone = palm.Backbone.from_pretrained(path)
    assert backbone.max_length == 64
    vectors = backbone(["so good"])
    assert isinstance(vectors, torch.Tensor)
    return {"vectors": vectors}


def by_teacher(path: Path, out: Path) -> State:
    values = changed(path, teacher={"path": str(path)})
    recipe = make_recipe(values)
    data = open_data(recipe)
    run = RunSpec(recipe=recipe, ds_config=MACHINE, folder=out)
    found = teachers_of_scores(resolve_teachers(recipe, data), run, data, ALONE)
    return found.teachers[0].model.state_dict()


def by_init_from(path: Path, out: Path) -> State:
    return started(starting_from(path), out).state_dict()


DOORS: Mapping[str, Callable[[Path, Path], State]] = {
    "predict": by_predict,
    "embed": by_embed,
    "fill-mask": by_fill_mask,
    "serve": by_serve,
    "convert": by_convert,
    "show": by_show,
    "palm.load": by_load,
    "palm.Backbone": by_backbone,
    "teacher": by_teacher,
    "init_from": by_init_from,
}


def changed(path: Path, **changes: Any) -> dict[str, Any]:
    """The recipe of the finished run next to a run, with changes."""
    return recipe_of(path.with_name("finished")).resolved() | changes


def starting_from(path: Path) -> Recipe:
    """A recipe without an encoder or a tokenizer of its own."""
    values = changed(path, init_from=str(path), backbone={})
    for source in values["sources"].values():
        source["tokenizer"] = ""
    return make_recipe(values)


def started(recipe: Recipe, folder: Path) -> Model:
    """The model of a run at its start."""
    data = open_data(recipe)
    run = RunSpec(recipe=recipe, ds_config=MACHINE, folder=folder)
    model = build_model(recipe, MACHINE, data.vocabulary, device=torch.device("cpu"))
    signature, stream = signature_of(run, model, data), build_stream(recipe, data)
    find_starting_point(run, model, signature, stream, data, ALONE)
    return model


# ---- tests ----


@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_the_same_weights(
    door: str, finished: Path, unfinished: Path, with_best: Path, tmp_path: Path
) -> None:
    """Those of the finished run, whose values the other two have in their best/ or in their newest
    good checkpoint."""
    found = {}
    places = {"none": unfinished / "checkpoints/step_00000001"}
    for name, path in {"finished": finished, "unfinished": unfinished, "best": with_best}.items():
        places[name] = path
    for name, path in places.items():
        (tmp_path / name).mkdir()
        if door in ("teacher", "init_from") and name == "none":
            continue
        found[name] = DOORS[door](path, tmp_path / name)
    wanted = found.pop("finished")
    other = found.pop("none", None)
    for name, state in found.items():
        assert state.keys() == wanted.keys()
        differing = [key for key in wanted if not torch.equal(wanted[key], state[key])]
        assert differing == [], name
    assert other is None or any(not torch.equal(wanted[key], other[key]) for key in wanted)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each file was hashed."""
    counts: Counter[Path] = Counter()
    for module in (checkpoint, model_folder):
        real = module.sha256_of_file

        def counting(path: Path, real: Callable[[Path], str] = real) -> str:
            counts[Path(path)] += 1
            return real(path)

        monkeypatch.setattr(module, "sha256_of_file", counting)
    return counts


def times(hashed: Counter[Path], folder: Path) -> set[int]:
    return {hashed[file] for file in folder.glob("*.safetensors")}


@pytest.mark.parametrize("door", sorted(set(DOORS) - {"show"}))
def test_a_file_is_hashed_once(
    door: str, finished: Path, unfinished: Path, tmp_path: Path, hashed: Counter[Path]
) -> None:
    for path in (finished, unfinished):
        (tmp_path / path.name).mkdir()
        hashed.clear()
        DOORS[door](path, tmp_path / path.name)
        assert times(hashed, finished / "weights") == {int(path == finished)}
        assert times(hashed, unfinished / "checkpoints/step_00000002") == {int(path == unfinished)}
        assert times(hashed, unfinished / "checkpoints/step_00000001") == {0}


def test_show_hashes_a_checkpoint_once(unfinished: Path, hashed: Counter[Path]) -> None:
    said(show.COMMAND, unfinished)
    assert times(hashed, unfinished / "checkpoints/step_00000002") == {1}


def test_a_command_says_which_weights_it_took_but_not_among_its_results(
    unfinished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "palm_ds")
    by_fill_mask(unfinished, tmp_path)  # its stdout is JSON
    taken = "has no weights/ yet; using checkpoints/step_00000002, its newest good checkpoint"
    assert taken in caplog.text and "step_00000003: not used" in caplog.text


@pytest.mark.parametrize("name", ["finished", "unfinished"])
def test_the_start_of_a_run_hashes_what_it_starts_from_once(
    name: str, finished: Path, unfinished: Path, tmp_path: Path, hashed: Counter[Path]
) -> None:
    """Recipe, sources, tasks, the run folder and the weights need it."""
    start = {"finished": finished, "unfinished": unfinished}[name]
    machine = make_ds_config({"zero_optimization": {"stage": 0}})
    run = RunSpec(recipe=starting_from(start), ds_config=machine, folder=tmp_path / "run")
    assert setup_run(run, dry_run=True) is None
    folder = (
        finished / "weights" if name == "finished" else unfinished / "checkpoints/step_00000002"
    )
    assert times(hashed, folder) == {1}


def test_a_run_that_begins_again_does_not_silently_start_from_other_weights(
    unfinished: Path, finished: Path, tmp_path: Path
) -> None:
    """Before its first checkpoint; afterwards what it started from may change or go."""
    start = tmp_path / "start"
    shutil.copytree(unfinished, start)
    values = changed(unfinished, init_from=str(start))
    run = RunSpec(recipe=make_recipe(values), ds_config=MACHINE, folder=tmp_path / "run")
    write_folder(run, {}, open_data(run.recipe))
    stored = yaml.safe_load((run.folder / "recipe.yaml").read_text())["corpora"]
    assert check_folder(run, open_data(run.recipe)) == []
    shutil.copytree(finished / "weights", start / "weights")
    with pytest.raises(UserError, match=f"a different recipe: the contents of {start}"):
        check_folder(run, open_data(run.recipe))
    (tmp_path / "other").mkdir()
    checkpoint_of(finished, tmp_path / "other", 1)
    shutil.copytree(tmp_path / "other/checkpoints", run.folder / "checkpoints")
    shutil.rmtree(start)
    data = open_data(run.recipe)
    assert check_folder(run, data) == []
    write_folder(run, {}, data)
    assert yaml.safe_load((run.folder / "recipe.yaml").read_text())["corpora"] == stored


def test_a_teacher_that_trains_on_is_another_teacher(unfinished: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(unfinished, teacher)
    recipe = make_recipe(changed(unfinished, teacher={"path": str(teacher)}))
    before = open_data(recipe).teachers
    assert open_data(recipe).teachers == before
    shutil.rmtree(teacher / "checkpoints/step_00000002")
    assert open_data(recipe).teachers.keys() == before.keys() != {}
    assert open_data(recipe).teachers != before


def test_vectors_of_an_unfinished_run_are_pooled_as_it_trains_them(
    finished: Path, tmp_path: Path
) -> None:
    """By the task that does, with its row of the task embedding, as those of its weights/ are."""
    alike = {"kind": "similarity", "source": "pairs", "pooling": "cls", "task_id": 3}
    tasks = {"pair": {**TASKS["pair"], "task_id": 1}, "alike": alike}
    backbone = recipe_of(finished).resolved()["backbone"]
    run = save_model(tmp_path / "finished", ["pair", "alike"], tasks=tasks, backbone=backbone)
    (tmp_path / "run").mkdir()
    checkpoint_of(run, tmp_path / "run", 1)
    found, other = (TrainedModel.open(x).embedder() for x in (tmp_path / "run", run))
    assert (found.settings.pooling, found.task_id) == ("cls", other.task_id) == ("cls", 3)
    asked = TrainedModel.open(run).embedder(found.settings)
    assert np.array_equal(found.embed(["so good"]), asked.embed(["so good"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp64"}, "precision: no .fp64.; did you mean .fp16."),
        ({"batch_tokens": -1}, "batch_tokens: expected 0 or more, got -1"),
    ],
)
def test_settings_are_checked_for_every_use(
    options: dict[str, Any], message: str, finished: Path
) -> None:
    with pytest.raises(UserError, match=message):
        TrainedModel.open(finished, **options)


def test_a_model_without_tasks_embeds_but_does_not_predict(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "weights", tmp_path / "weights")
    said(convert.COMMAND, finished, tmp_path / "hf", "--to", "huggingface", "--onnx", "none")
    opened = TrainedModel.open(tmp_path / "hf")
    assert opened.embedder().embed(["so good"]).shape == (1, 16)
    with pytest.raises(UserError, match="no head that predicts"):
        opened.predictor()


def test_only_a_training_is_told_that_its_start_has_no_pooler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_bert(tmp_path, BertForMaskedLM, ["so", "good"], length=16)
    caplog.set_level(logging.WARNING, "palm_ds")
    assert TrainedModel.open(folder).embedder().embed(["so good"]).shape == (1, 16)
    assert "pooler" not in caplog.text
    contents = open_model(folder)
    assert any("no pooler" in note for note in contents.all_notes)
    assert not any("no pooler" in note for note in contents.notes_on_use)


def test_predictions_have_the_rotary_base_of_the_stage_of_the_weights(tmp_path: Path) -> None:
    """With that of the recipe's encoder, weights of an earlier stage did not open."""
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 64}
    stages = [{"mood": 2, "rope_base": 9.0}, {"mood": 2, "rope_base": 500.0}]
    backbone = {"kind": "gte", **sizes, "options": {"rotary_base": 500.0}}
    run = save_model(tmp_path / "run", ["mood"], backbone=backbone)
    recipe = make_recipe({**recipe_of(run).resolved(), "stages": stages})
    data = open_data(recipe)
    model = build_model(recipe, MACHINE, data.vocabulary, device=torch.device("cpu"))
    info, folder = info_of(recipe, model, steps=2), tmp_path / "best"
    save_weights(model, folder, info, tokenizer=data.tokenizer)
    encoder: Any = TrainedModel.open(folder).predictor(["mood"]).model.backbone
    assert {layer.rotary.base for layer in encoder.computed_layers} == {9.0}
