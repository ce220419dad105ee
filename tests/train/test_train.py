"""The output of a finished run, and the checks before one, as far as they need no engine."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from palm_ds.common.errors import TemporaryError, UserError, exit_on_user_error
from palm_ds.runtime.checkpoint import checkpoint, full_disk
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes import rank_status
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.runtime.zero import swap_folder
from palm_ds.train.export import FinalWeights, export, exported_tokenizer
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup import run_folder
from palm_ds.train.setup.build import build_model
from palm_ds.train.setup.run_folder import (
    RunSpec,
    lock_folder,
    prepare_swap_folder,
    wait_for_swap_room,
)
from palm_ds.train.setup.sources import open_data
from palm_ds.train.train import TrainingRun, train
from palm_ds.weights.formats.weights_info import INFO, read_info
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.small_disk import empty, fill, small_disk
from tests.helpers.small_tables import write_tables

MASKS, APART = "knowledge_masking", "sentence_distance"


def two_sources(folder: Path) -> Recipe:
    """A recipe of two corpora."""
    for name in "ab":
        write_small_corpus(folder / name, documents=8)
    return make_recipe(
        {
            "backbone": {"preset": "tiny", "max_positions": 32},
            "length": 32,
            "batch": "4 rows",
            "sources": {"text": {"mix": {str(folder / "a"): 1, str(folder / "b"): 1}}},
            "tasks": {MASKS: {"source": "text"}},
            "stages": [{MASKS: 2}],
        }
    )


@pytest.mark.parametrize(
    ("options", "done"),
    [
        ([{"simplify": True, "lower": True}] * 2, "汉A"),
        ([{}, {}], "漢A"),
        ([{"simplify": True}, {}], "漢A"),
    ],
)
def test_the_exported_tokenizer_does_what_the_corpora_had_done(
    tmp_path, caplog, options, done
) -> None:
    recipe = two_sources(tmp_path)
    data = open_data(recipe)
    for corpus, text in zip(data.corpora.values(), options, strict=True):
        corpus.manifest = replace(corpus.manifest, options={"text": text})
    with caplog.at_level("INFO"):
        normalizer = exported_tokenizer(recipe, data).backend.normalizer
    assert normalizer is not None
    wanted = done.lower() if options[0].get("lower") else done
    assert normalizer.normalize_str("漢A").replace(" ", "") == wanted
    assert ("only some sources were simplified" in caplog.text) == (options[0] != options[1])


@pytest.mark.parametrize(
    ("kind", "optimizer", "problem"),
    [
        ("bag_of_words", {"kind": "muon"}, "optimizer.kind: muon is for matrices named"),
        ("bag_of_words", {"layer_decay": 0.5}, "optimizer.layer_decay: the model has no layers"),
        ("bert", {"fgm": 0.1}, "optimizer.fgm: tasks.search compares all texts of a step"),
    ],
)
def test_a_dry_run_refuses_what_the_engine_would(
    tmp_path: Path, kind: str, optimizer: dict[str, Any], problem: str
) -> None:
    """All checks passed, and the run itself failed."""
    words = write_tables(tmp_path) / "vocab.txt"
    lines = [f"w{number} w1\tw{number} w2" for number in range(8)]
    (tmp_path / "rows.tsv").write_text("\n".join(["query\tpositive", *lines]) + "\n")
    values = {
        "backbone": {"kind": kind, "hidden_size": 16, "max_positions": 32}
        | ({"num_layers": 1, "num_heads": 2} if kind == "bert" else {}),
        "length": 32,
        "batch": "4 examples",
        "optimizer": optimizer,
        "sources": {"rows": {"table": str(tmp_path / "rows.tsv"), "tokenizer": str(words)}},
        "held_out": 0,
        "tasks": {"search": {"kind": "retrieval", "source": "rows"}},
        "stages": [{"search": 2}],
        "export_onnx": [],
    }
    how = make_ds_config({"zero_optimization": {"stage": 0}})
    run = RunSpec(recipe=make_recipe(values), ds_config=how, folder=tmp_path / "run")
    with pytest.raises(UserError, match=problem):
        train(run, dry_run=True)


def test_a_dry_run_refuses_what_the_device_cannot_do(tmp_path: Path) -> None:
    """`--check` said that all was well, and the run itself ended."""
    zero = {"stage": 3, "zero_quantized_weights": True}
    how = make_ds_config({"zero_optimization": zero}, where="m.json")
    run = RunSpec(recipe=two_sources(tmp_path), ds_config=how, folder=tmp_path / "run")
    with pytest.raises(UserError, match="m.json: zero_optimization.zero_quantized_weights: needs"):
        train(run, dry_run=True)


@pytest.mark.parametrize(
    ("chosen", "name", "row"),
    [("", MASKS, 1), (MASKS, MASKS, 1), (APART, APART, 0), ("phrases", "phrases", 1)],
)
@pytest.mark.parametrize("family", ["bert", "ernie"])
def test_texts_are_read_as_export_task(tmp_path, chosen, name, row, family) -> None:
    """By default as the first masked-words task; a task that shares a head has its row. The row is
    the first of an Ernie, and is part of every token type of a Bert."""
    write_small_corpus(tmp_path / "corpus", documents=8)
    values: dict[str, Any] = {
        "backbone": {"preset": "tiny", "max_positions": 32, "task_types": 4},
        "length": 32,
        "batch": "4 rows",
        "sources": {"text": {"corpus": str(tmp_path / "corpus")}},
        "held_out": 0.2,
        "tasks": {
            APART: {"source": "text"},
            MASKS: {"source": "text"},
            "phrases": {"kind": MASKS, "source": "text", "share": MASKS},
        },
        "stages": {"joint": [APART, MASKS, "phrases"], "steps": 2},
        "export_task": chosen,
        "export_family": family,
    }
    recipe = make_recipe(values, "recipe.yaml")
    ds_config = make_ds_config({"zero_optimization": {"stage": 0}})
    run = RunSpec(recipe=recipe, ds_config=ds_config, folder=tmp_path / "run")
    data = open_data(recipe)
    model = build_model(recipe, ds_config, data.vocabulary, device=torch.device("cpu"))
    final = FinalWeights(state=model.state_dict(), adapter={}, steps=recipe.curriculum.steps)
    export(run, model, final, data)
    info = read_info(Path(run.folder / "weights") / INFO)
    assert (info.export_task, info.task_id) == (name, row)
    theirs = load_file(run.folder / "hf" / "model.safetensors")
    ours = model.backbone.state_dict()
    wanted = ours["task.weight"][row]
    if family == "ernie":
        (table,) = [value for key, value in theirs.items() if "task_type_embeddings" in key]
    else:
        (table,) = [value for key, value in theirs.items() if "token_type_embeddings" in key]
        wanted = ours["segment.weight"][0] + wanted
    assert torch.equal(table[0], wanted)


def test_retromae_leaves_vectors_of_cls(tmp_path) -> None:
    """hf/ has the pooling and the masked-LM head, but not the decoder, which weights/ keeps."""
    write_small_corpus(tmp_path / "corpus", documents=8)
    recipe = make_recipe(
        {
            "backbone": {"preset": "tiny", "max_positions": 32},
            "length": 32,
            "batch": "4 rows",
            "sources": {"text": {"corpus": str(tmp_path / "corpus")}},
            "tasks": {"retromae": {"source": "text"}, MASKS: {"source": "text"}},
            "stages": [{f"retromae + {MASKS}": 2}],
        }
    )
    ds_config = make_ds_config({"zero_optimization": {"stage": 0}})
    run = RunSpec(recipe=recipe, ds_config=ds_config, folder=tmp_path / "run")
    data = open_data(recipe)
    model = build_model(recipe, ds_config, data.vocabulary, device=torch.device("cpu"))
    state = model.state_dict()
    export(run, model, FinalWeights(state=state, adapter={}, steps=2), data)
    assert read_info(run.folder / "weights" / INFO).export_task == "retromae"
    stored = load_file(run.folder / "weights" / "weights.safetensors")
    assert stored.keys() == state.keys() and "heads.retromae.layer.query.weight" in stored
    hf = run.folder / "hf"
    assert '"pooling_mode_cls_token": true' in (hf / "1_Pooling" / "config.json").read_text()
    written = load_file(hf / "model.safetensors")
    assert "cls.predictions.bias" in written and not [x for x in written if "retromae" in x]


def test_palm_ds_run_hears_from_which_checkpoint_a_start_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a start has made no checkpoint of its own yet."""
    recipe = replace(two_sources(tmp_path), held_out=0.0, export_onnx=())
    run = RunSpec(recipe=recipe, ds_config=make_ds_config({}), folder=tmp_path / "run")
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(rank_status.FOLDER, str(tmp_path / name))
        assert train(run) == 0
        found += [(x.saved, x.resumed) for x in rank_status.read_all(tmp_path / name)]
    assert found == [(2, 0), (2, 2)]


def test_a_run_that_starts_again_waits_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with the exit code of a mistake, after which nothing starts it again."""
    recipe = replace(two_sources(tmp_path), held_out=0.0, export_onnx=())
    with small_disk(tmp_path / "disk", "40m") as disk:
        run = RunSpec(recipe=recipe, ds_config=make_ds_config({}), folder=disk / "run")
        assert train(run) == 0
        said: list[str] = []

        def waited(attempt: Callable[[], str], **more: Any) -> str:
            def say(line: str) -> None:
                said.append(line)
                empty(disk)

            return full_disk.retried(attempt, **more | {"say": say, "pause": 0.01})

        monkeypatch.setattr(run_folder, "retried", waited)
        fill(disk)
        assert train(run) == 0
    (line,) = said
    assert line.startswith(f"run folder {disk}/run: cannot be written: No space left on device; ")


def test_a_disk_that_stays_full_is_tried_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "PATIENCE_SECONDS", 0.02)
    with small_disk(tmp_path / "disk", "100k") as disk:
        how = make_ds_config({})
        run = RunSpec(recipe=cast(Any, None), ds_config=how, folder=disk / "run")
        (run.checkpoints / checkpoint.folder_name(2)).mkdir(parents=True)
        fill(disk)
        with pytest.raises(TemporaryError, match="No space left on device; the same command"):
            lock_folder(run, SINGLE_PROCESS)


def test_too_small_a_disk_for_the_optimizer_is_no_mistake_of_a_run_that_started_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with the exit code of one, after which nothing starts it again."""
    monkeypatch.setattr(run_folder, "PATIENCE_SECONDS", 0.02)
    free = [0]
    monkeypatch.setattr(swap_folder, "swap_bytes", lambda values: free[0] + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    how = make_ds_config({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    run = RunSpec(recipe=cast(Any, None), ds_config=how, folder=tmp_path / "run")
    (run.checkpoints / checkpoint.folder_name(2)).mkdir(parents=True)
    model, alone = cast(Any, torch.nn.Linear(2, 2)), cast(Any, SINGLE_PROCESS)
    text = "nvme_path: .*: No space left on device: 0 B free, but .* takes 1 B; the same command"
    with pytest.raises(TemporaryError, match=text):
        wait_for_swap_room(run, model, alone)
    monkeypatch.setattr(swap_folder, "swap_bytes", lambda values: 0)
    monkeypatch.setattr(swap_folder, "_lockable_bytes", lambda: float("inf"))
    wait_for_swap_room(run, model, alone)


def test_a_run_whose_optimizer_files_have_a_read_only_disk_now_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart ended with the exit code of a mistake."""
    monkeypatch.setattr(run_folder, "PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(swap_folder, "_check_async_io", lambda where: None)
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    how = make_ds_config({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    run = RunSpec(recipe=cast(Any, None), ds_config=how, folder=tmp_path / "run")
    opens, refused, usual = [0], [99], os.open

    def open_file(path: Any, *how: Any) -> int:
        if not str(path).endswith(".probe"):
            return usual(path, *how)
        opens[0] += 1
        if opens[0] <= refused[0]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return usual(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(swap_folder, "check_locks", lambda probe, where: None)
    text = "nvme_path: .*: cannot be written: Read-only file system"
    with pytest.raises(UserError, match=f"{text}$"):
        prepare_swap_folder(run, dry_run=False)
    (run.checkpoints / checkpoint.folder_name(2)).mkdir(parents=True)
    with pytest.raises(UserError, match=f"{text}$"):
        prepare_swap_folder(run, dry_run=True)
    with pytest.raises(TemporaryError, match=f"{text}; the same command tries again"):
        prepare_swap_folder(run, dry_run=False)
    refused[0] = opens[0] + 1
    prepare_swap_folder(run, dry_run=False)


FULL, REFUSED = "x: No space left on device", "x: Permission denied"


@pytest.mark.parametrize(
    ("problem", "saved", "stopped", "code", "rest"),
    [
        (FULL, 9, False, 1, "the training is in checkpoints/, and the same command writes them"),
        (FULL, 9, True, 75, "the training is in checkpoints/, and the same command writes them"),
        (FULL, 6, True, 1, "the last checkpoint is of step 6, and the same command continues from"),
        (REFUSED, 9, False, 2, "the training is in checkpoints/, and the same command writes them"),
    ],
)
def test_weights_that_cannot_be_written_may_be_later(
    tmp_path: Path,
    problem: str,
    saved: int,
    stopped: bool,
    code: int,
    rest: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A full disk was a mistake, after which nothing that started the run starts it again."""
    recipe = two_sources(tmp_path)
    saver = SimpleNamespace(
        write_at_rank0=lambda write: problem, flag=SimpleNamespace(stop_requested=stopped)
    )
    loop = SimpleNamespace(saver=saver, steps_done=9, best=SimpleNamespace(step=-1))
    run = RunSpec(recipe=recipe, ds_config=make_ds_config({}), folder=tmp_path / "run")
    (run.checkpoints / checkpoint.folder_name(saved)).mkdir(parents=True)
    more: Any = dict.fromkeys(("data", "model", "next_step", "lock"))
    training = TrainingRun(run=run, loop=cast(Any, loop), **more)
    with pytest.raises(SystemExit) as ended, exit_on_user_error():
        training._export({})
    assert ended.value.code == code
    said = f"{run.folder}: the final weights cannot be written: {problem}; {rest}"
    assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize("problem", ["", "for the texts of step 9 the loss of task is 99"])
def test_the_last_weights_replace_averages_that_are_worse(problem: str) -> None:
    """Averages that held a spike were the final weights of a run that had recovered from it."""
    held = ["last"]
    lines: list[str] = []

    @contextmanager
    def averages() -> Iterator[None]:
        held.append("averages")
        yield
        held.pop()

    engine = SimpleNamespace(ema_weights=averages, full_state_dict=lambda: {"held": held[-1]})
    recovery = SimpleNamespace(
        averages_problem=lambda: problem, event=lambda name, text: lines.append(text)
    )
    loop = SimpleNamespace(engine=engine, recovery=recovery)
    more: Any = dict.fromkeys(("run", "data", "model", "next_step", "lock"))
    run = TrainingRun(loop=cast(Any, loop), **more)
    assert run.final_state() == {"held": "last" if problem else "averages"}
    said = f"optimizer.ema: the averaged weights are not good: {problem}; the final weights are "
    assert lines == ([said + "those of the last step"] if problem else [])
