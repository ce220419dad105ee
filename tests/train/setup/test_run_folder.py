"""The run folder: what cannot be one is refused before anything is computed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.corpus.mine_ngrams import mine_ngrams
from palm_ds.runtime.checkpoint.checkpoint import steps_in
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.setup.run_folder import (
    RunSpec,
    check_folder,
    check_writable,
    restore_folder,
    write_folder,
)
from palm_ds.train.setup.sources import open_data
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.small_disk import small_disk
from tests.helpers.small_tables import TINY


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "new" / "run")
    with pytest.raises(UserError, match="run folder .*file: is a file; name a folder"):
        check_writable(tmp_path / "file")
    with pytest.raises(UserError, match="run folder .*file/run: .*file is a file; name a folder"):
        check_writable(tmp_path / "file" / "run")


def test_a_disk_that_became_read_only_is_no_mistake(tmp_path: Path) -> None:
    """An error of the disk makes the system do so, until it is repaired."""
    with small_disk(tmp_path / "disk", "100k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(UserError, match="disk cannot be written$"):
            check_writable(disk)
        with pytest.raises(TemporaryError, match="cannot be written: Read-only file system; the"):
            check_writable(disk, begun=True)


def test_a_folder_whose_file_server_is_away_is_left_to_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "exists", fail)
    how = DSConfig(path="", sections={}, stage=0, precision="fp32")
    run = RunSpec(recipe=cast(Any, None), ds_config=how, folder=tmp_path)
    assert not restore_folder(run, {}, cast(Any, None))


def test_folders_of_somebody_else_are_not_replaced(tmp_path: Path) -> None:
    """Weights that were there were deleted at the end of a run that was started in their folder."""
    how = DSConfig(path="", sections={}, stage=0, precision="fp32")
    run = RunSpec(recipe=cast(Any, None), ds_config=how, folder=tmp_path)
    (tmp_path / "hf").mkdir()
    assert check_folder(run, cast(Any, None)) == []
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/mine.bin").touch()
    with pytest.raises(UserError, match="weights: is of no run, as there is no .*recipe.yaml"):
        check_folder(run, cast(Any, None))


@pytest.mark.parametrize(("steps", "said"), [(4, " finished"), (1, " finished"), (2, "")])
def test_a_longer_plan_in_the_folder_of_a_finished_run_is_told_how_to_go_on(
    tmp_path: Path, steps: int, said: str
) -> None:
    corpus = write_small_corpus(tmp_path / "corpus", documents=20)

    def run(steps: int, seed: int) -> RunSpec:
        values = {
            "seed": seed,
            "backbone": TINY,
            "length": 32,
            "batch": "4 rows",
            "sources": {"text": {"corpus": str(corpus.path)}},
            "tasks": {"knowledge_masking": {"source": "text"}},
            "stages": [{"knowledge_masking": steps}],
        }
        how = DSConfig(path="", sections={}, stage=0, precision="fp32")
        return RunSpec(recipe=make_recipe(values), ds_config=how, folder=tmp_path / "run")

    data = open_data(run(2, seed=1).recipe)
    write_folder(run(2, seed=1), {}, data)
    (tmp_path / f"run/checkpoints/step_0000000{2 if said else 1}").mkdir(parents=True)
    assert steps_in(tmp_path / "run/checkpoints")
    with pytest.raises(UserError, match=f"run: holds a{said} run of a different recipe") as caught:
        check_folder(run(steps, seed=2), data)
    hint = f"Choose another folder (`init_from: {tmp_path / 'run'}` starts from its weights), or"
    assert (hint in str(caught.value)) == bool(said)


def test_a_resumed_run_keeps_the_time_of_its_first_start(tmp_path: Path) -> None:
    corpus = write_small_corpus(tmp_path / "corpus", documents=20)
    values = {
        "backbone": TINY,
        "length": 32,
        "batch": "4 rows",
        "sources": {"text": {"corpus": str(corpus.path)}},
        "tasks": {"knowledge_masking": {"source": "text"}},
        "stages": [{"knowledge_masking": 2}],
    }
    how = DSConfig(path="", sections={}, stage=0, precision="fp32")
    run = RunSpec(recipe=make_recipe(values), ds_config=how, folder=tmp_path / "run")
    data, about = open_data(run.recipe), tmp_path / "run/environment.json"
    for before, first in (("", "2"), ('{"started": "1999"}', "2"), ('{"started": "1999"}', "1999")):
        if before:
            about.write_text(before)
        if first == "1999":
            (run.checkpoints / "step_00000001").mkdir(parents=True)
        write_folder(run, {}, data)
        found = json.loads(about.read_text())
        assert found["started"].startswith(first) and ("resumed" in found) == (first == "1999")
    about.write_text("{")
    write_folder(run, {}, data)
    assert "resumed" not in json.loads(about.read_text())


def test_a_run_is_not_continued_with_other_files_of_its_tasks(tmp_path: Path) -> None:
    """The rows of its heads mean the n-grams and markers that it began with."""
    corpus = write_small_corpus(tmp_path / "corpus", documents=20)
    markers, lexicon = tmp_path / "markers.txt", tmp_path / "ngrams.tsv"
    mine_ngrams(corpus.path, lexicon, sizes=(20,), least=3)
    markers.write_text("but\nand\n")
    ngrams = {"source": "text", "lexicon": str(lexicon)}
    values = {
        "backbone": {**TINY, "task_types": 0},
        "length": 32,
        "batch": "4 rows",
        "sources": {"text": {"corpus": str(corpus.path)}},
        "tasks": {
            "explicit_ngram_masking": ngrams,
            "discourse_relation": {"source": "text", "markers": str(markers)},
        },
        "stages": [{"explicit_ngram_masking": 2, "discourse_relation": 2}],
    }

    def run() -> RunSpec:
        return RunSpec(
            recipe=make_recipe(values),
            ds_config=DSConfig(path="", sections={}, stage=0, precision="fp32"),
            folder=tmp_path / "run",
        )

    data = open_data(run().recipe)
    write_folder(run(), {}, data)
    markers.write_text("but  # one\nand  # another\n")
    assert check_folder(run(), data) == []
    markers.write_text("and\nbut\n")
    with pytest.raises(UserError, match=r"a different recipe: the contents of .*markers\.txt"):
        check_folder(run(), data)
    markers.write_text("but\nand\n")
    lines = lexicon.read_text().splitlines()
    lexicon.write_text("\n".join([*lines[:2], *reversed(lines[2:])]))
    with pytest.raises(UserError, match=r"a different recipe: the contents of .*ngrams\.tsv"):
        check_folder(run(), data)
