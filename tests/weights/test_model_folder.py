"""The weights that a path stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.weights.model_folder import ModelFolder, encoder_config, open_model
from palm_ds.weights.weights_folder import save_weights
from tests.weights.formats.test_native import CONFIG, flip, info, model, save

TABLE = "backbone.word.weight"


def table_of(path: Path) -> torch.Tensor:
    return open_model(path).entries[TABLE].read()


def is_of(path: Path, seed: int) -> bool:
    return torch.equal(table_of(path), model(seed).state_dict()[TABLE])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    save(tmp_path / "checkpoints", model(1), step=5)
    save(tmp_path / "checkpoints", model(2), step=9)
    stages = "[{words: 10, mix: step, lr: 1.0e-3}, {words: 2, weight_decay: 0}]"
    (tmp_path / "recipe.yaml").write_text(f"tasks: {{words: {{}}}}\nstages: {stages}\n")
    return tmp_path


def test_a_run_is_its_weights_else_its_best_else_its_newest_checkpoint(run: Path) -> None:
    assert is_of(run, 2) and is_of(run / "checkpoints", 2)
    (note,) = open_model(run).folder_notes
    taken = "checkpoints/step_00000009, its newest good checkpoint"
    assert note == f"{run}: has no weights/ yet; using {taken}"
    save_weights(model(3), run / "best", info())
    assert is_of(run, 3)
    assert open_model(run).folder_notes == (
        f"{run}: has no weights/ yet; using best, its best weights so far",
    )
    save_weights(model(4), run / "weights", info())
    assert is_of(run, 4) and open_model(run).folder_notes == ()
    assert ModelFolder.find(run).path == run / "weights"


@pytest.mark.parametrize("part", ["weights", "best", "checkpoints/step_00000005"])
def test_a_part_of_a_run_is_itself(part: str, run: Path) -> None:
    save_weights(model(3), run / "best", info())
    save_weights(model(4), run / "weights", info())
    found = ModelFolder.find(run / part)
    assert found.path == run / part and found.notes == ()
    assert is_of(run / part, {"weights": 4, "best": 3}.get(part, 1))


def test_the_checkpoints_of_a_finished_run_say_nothing_of_its_weights(run: Path) -> None:
    save_weights(model(4), run / "weights", info())
    place = run / "checkpoints"
    (note,) = ModelFolder.find(place).notes
    assert note == f"{place}: using step_00000009, its newest good checkpoint"


def test_a_damaged_newest_checkpoint_is_skipped_with_a_line(run: Path) -> None:
    flip(next((run / "checkpoints/step_00000009").glob("*.safetensors")))
    (run / "checkpoints/step_00000010.partial").mkdir()
    contents = open_model(run)
    assert contents.format.endswith("step 5") and is_of(run, 1)
    taken, bad = contents.folder_notes
    assert "step_00000005" in taken and "step_00000009: not used" in bad


def test_a_run_without_a_good_checkpoint(run: Path) -> None:
    for step in (5, 9):
        flip(next((run / f"checkpoints/step_{step:08}").glob("*.safetensors")))
    with pytest.raises(UserError, match="no good checkpoint among 2 .*step_00000009.*checksum"):
        ModelFolder.find(run)


def test_a_run_with_nothing_yet_says_how_far_it_is(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    looked_for = "no weights/, no best/ and no checkpoint in checkpoints/; the command that started"
    for done, lines in (
        ("no step logged", []),
        ("3 of 12 steps done", [{"kind": "step", "step": 2}, {"kind": "step", "step": 3}]),
        ("3 of 12 steps done", [{"kind": "step", "step": 3}, {"kind": "save", "step": 4}, "{"]),
    ):
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for ask in (open_model, encoder_config):
            with pytest.raises(UserError) as caught:
                ask(run)
            said = str(caught.value)
            assert (
                said.startswith(f"{run}: this run is not finished ({done})") and looked_for in said
            )


def test_damaged_weights_are_not_replaced_by_others(run: Path) -> None:
    save_weights(model(4), run / "weights", info())
    (run / "weights/weights.json").unlink()
    with pytest.raises(UserError, match="weights: not a checkpoint of a known format"):
        open_model(run)


def test_other_paths_are_themselves(tmp_path: Path) -> None:
    assert ModelFolder.find(tmp_path).path == tmp_path
    with pytest.raises(UserError, match="not a checkpoint of a known format"):
        open_model(tmp_path)
    with pytest.raises(UserError, match="gone: no such file or folder"):
        open_model(tmp_path / "gone")


def test_options_are_those_of_the_format(run: Path) -> None:
    assert open_model(run, eps=1e-3).config.layer_norm_eps == 1e-3
    with pytest.raises(UserError, match="no option 'prefix'"):
        open_model(run, prefix="a")


def test_the_encoder_is_known_without_hashing_a_file(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "check_file", None)
    assert encoder_config(run) == encoder_config(run / "checkpoints/step_00000005") == CONFIG
    (run / "checkpoints/step_00000009/manifest.json").write_text("{")
    assert encoder_config(run) == CONFIG
    save_weights(model(4), run / "weights", info())
    assert encoder_config(run) == encoder_config(run / "weights") == CONFIG
