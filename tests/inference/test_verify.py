"""`palm-ds verify FOLDER`: every flipped bit of a corpus or a checkpoint is found and named."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import fsspec
import pytest
from safetensors.torch import save_file
from torch import ones

from palm_ds.cli.verify import COMMAND
from palm_ds.common.errors import UserError
from palm_ds.common.json_files import SEAL
from palm_ds.corpus.manifest import NAME, read_manifest
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.inference.verify import verify_folder
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from tests.helpers.saved_model import save_model
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.write_checkpoint import write_checkpoint


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_small_corpus(tmp_path / "corpus", documents=4)
    return tmp_path / "corpus"


def write_one(folder: Path, step: int) -> Path:
    return write_checkpoint(
        folder,
        step,
        write=lambda path, written: written.write(
            path / "a.safetensors", lambda file: save_file({"w": ones(9)}, file)
        ),
        layout=checkpoint.Layout(world=1, stage=0, precision="fp32"),
        parameters={"w": step},
        engine={},
        state={},
        group=SINGLE_PROCESS,
        keep=9,
    )


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_a_run_and_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_one(tmp_path / "run" / "checkpoints", step) for step in (1, 2)]
    assert COMMAND.call([str(tmp_path / "run")]) == 0
    assert COMMAND.call([str(folders[0])]) == 0
    assert capsys.readouterr().out.count("undamaged (1 file)") == 3
    flip(folders[1] / "a.safetensors", 500)
    assert COMMAND.call([str(tmp_path / "run" / "checkpoints"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        str(folders[1]): ["a.safetensors has changed since it was written (checksum mismatch)"],
        str(folders[0]): [],
    }


def test_every_sampled_bit_of_a_checkpoints_manifest(tmp_path: Path) -> None:
    folder = write_one(tmp_path, 1)
    bits = random.Random(1).sample(range((folder / NAME).stat().st_size * 8), 300)
    for bit in bits:
        flip(folder / NAME, bit)
        (found,) = verify_folder(tmp_path)
        assert found.problems, bit
        flip(folder / NAME, bit)
    assert not verify_folder(tmp_path)[0].problems


def test_every_sampled_bit_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` and whatever reads them notice it, in every file."""
    run = save_model(tmp_path / "run", ["mood"])
    weights, draw = run / "weights", random.Random(1)
    assert COMMAND.call([str(run)]) == 0
    files = sorted(x for x in weights.rglob("*") if x.is_file())
    many = len(files)
    assert capsys.readouterr().out == f"{weights}: undamaged ({many} files)\n" and many > 2
    for number in range(200):
        file = files[number % many]
        bit = draw.randrange(file.stat().st_size * 8)
        flip(file, bit)
        (found,) = verify_folder(weights)
        assert len(found.problems) == 1 and str(file) in found.problems[0], (file, bit)
        if number < 3 * many:
            with pytest.raises(UserError, match=re.escape(str(file))):
                TrainedModel.open(run).predictor()
        flip(file, bit)
    assert not verify_folder(run)[0].problems
    TrainedModel.open(run).predictor()


def test_weights_without_hashes_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_model(tmp_path / "run", ["mood"])
    file = run / "weights" / "weights.json"
    state = json.loads(file.read_text()) | {"format": 1}
    del state[SEAL], state["files"]
    file.write_text(json.dumps(state))
    TrainedModel.open(run).predictor()
    assert COMMAND.call([str(run)]) == 0
    assert "has no hashes (written by an earlier version)" in capsys.readouterr().out


def test_every_sampled_bit_of_a_corpus(corpus: Path) -> None:
    names, draw = [NAME, *read_manifest(corpus).files], random.Random(1)
    for _ in range(300):
        file = corpus / draw.choice([NAME, *names])
        if not (size := file.stat().st_size):
            continue
        bit = draw.randrange(size * 8)
        flip(file, bit)
        assert verify_folder(corpus)[0].problems, (file, bit)
        flip(file, bit)
    assert not verify_folder(corpus)[0].problems


def test_what_cannot_be_verified(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(UserError, match="neither a corpus nor a run"):
        COMMAND.call([str(tmp_path)])
    with pytest.raises(UserError, match="no such folder"):
        COMMAND.call([str(tmp_path / "none")])
    with pytest.raises(UserError, match="--eps: compares outputs"):
        COMMAND.call([str(corpus), "--eps", "1e-5"])


def test_a_corpus_behind_a_url(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file is compared as it is fetched."""
    monkeypatch.setenv("PALM_DS_CACHE", str(corpus.parent / "cache"))
    memory = fsspec.filesystem("memory")
    memory.put(str(corpus), "/verified/corpus", recursive=True)
    url = "memory://verified/corpus"
    assert COMMAND.call([url]) == 0 and f"{url}: undamaged" in capsys.readouterr().out
    shutil.rmtree(corpus.parent / "cache")
    memory.rm("/verified", recursive=True)
    flip(corpus / "index" / "sentence_starts.npy", 3)
    memory.put(str(corpus), "/verified/corpus", recursive=True)
    assert COMMAND.call([url]) == 1 and "DAMAGED" in capsys.readouterr().out
    memory.rm("/verified", recursive=True)
