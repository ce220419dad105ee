"""Merged checkpoints against numpy, and what cannot be merged."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

import palm_ds as palm
from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.weights.convert.merge import (
    MergeOptions,
    ema,
    merge_checkpoints,
    slerp,
    sources_of,
    ties,
)
from palm_ds.weights.formats.weights_info import INFO, read_info, write_info
from palm_ds.weights.model_folder import open_model
from tests.helpers.saved_model import save_model, texts

BERT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three Hugging Face folders of one shape."""
    folder = tmp_path_factory.mktemp("bert")
    for seed in range(3):
        torch.manual_seed(seed)
        BertForMaskedLM(BertConfig(**BERT)).save_pretrained(folder / str(seed))
    return [folder / str(seed) for seed in range(3)]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {k: v.double().numpy() for k, v in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("weights", [(), (3.0, 1.0, 0.0)])
def test_the_mean_is_the_mean(folders: list[Path], tmp_path: Path, weights: Any) -> None:
    out = tmp_path / "out"
    lines = merge_checkpoints(folders, out, MergeOptions(weights=weights))
    assert lines[-1] == f"written to {out}" and len(lines) == 4
    shares = np.array(weights or (1, 1, 1)) / sum(weights or (1, 1, 1))
    parts, merged = [tensors(folder) for folder in folders], tensors(out)
    for name, value in merged.items():
        wanted = sum(share * part[name] for share, part in zip(shares, parts, strict=True))
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-8)
    assert merged.keys() == parts[0].keys()
    assert AutoModelForMaskedLM.from_pretrained(out).config.hidden_size == 8
    card = (out / "README.md").read_text()
    assert "method: mean" in card and "name: '2'" in card and str(tmp_path) not in card


def test_a_moving_average_ends_with_the_newest() -> None:
    values = [torch.tensor([x], dtype=torch.float64) for x in (1.0, 2.0, 4.0)]
    wanted = MergeOptions(method="ema", decay=0.75)
    assert ema(values, None, wanted).item() == 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 4


def test_slerp_follows_the_arc() -> None:
    one, other = torch.tensor([2.0, 0.0]).double(), torch.tensor([0.0, 2.0]).double()

    def at(share: float) -> torch.Tensor:
        weights = (1 - share, share)
        return slerp([one, other], None, MergeOptions(method="slerp", weights=weights))

    torch.testing.assert_close(at(0.0), one)
    torch.testing.assert_close(at(1.0), other)
    torch.testing.assert_close(at(0.5), torch.full((2,), 2**0.5).double())
    third = torch.tensor([np.cos(np.pi / 6), np.sin(np.pi / 6)]) * 2
    torch.testing.assert_close(at(1 / 3), third.double())
    for alike in (one, 2 * one, 0 * one):  # no arc
        found = slerp([one, alike], None, MergeOptions(method="slerp"))
        torch.testing.assert_close(found, (one + alike) / 2)


def restated_ties(base: np.ndarray, values: np.ndarray, weights: np.ndarray, density: float) -> Any:
    """TIES, section 3 of the paper, value by value."""
    changes = values - base
    for change in changes:
        least = np.sort(np.abs(change))[::-1][round(density * change.size) - 1]
        change[np.abs(change) < least] = 0
    merged = base.copy()
    for place in range(base.size):
        column = changes[:, place]
        sign = np.sign((weights * column).sum())
        agree = (np.sign(column) == sign) & (column != 0)
        if agree.any():
            merged[place] += (weights * column)[agree].sum() / weights[agree].sum()
    return merged


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_against_a_restatement(density: float) -> None:
    rng = np.random.default_rng(1)
    base, values = rng.normal(size=50), rng.normal(size=(3, 50))
    weights = np.array([0.5, 0.3, 0.2])
    wanted = MergeOptions(
        method="ties", base=Path("x"), density=density, weights=tuple(weights.tolist())
    )
    found = ties([torch.tensor(value) for value in values], torch.tensor(base), wanted)
    np.testing.assert_allclose(found.numpy(), restated_ties(base, values, weights, density))


def test_ties_of_folders_have_a_common_ancestor(folders: list[Path], tmp_path: Path) -> None:
    wanted = MergeOptions(method="ties", base=folders[0], density=1.0)
    merge_checkpoints(folders[1:], tmp_path / "out", wanted)
    base, *parts = (tensors(folder) for folder in folders)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    values = np.stack([part[name].ravel() for part in parts])
    restated = restated_ties(base[name].ravel(), values, np.array([0.5, 0.5]), 1.0)
    np.testing.assert_allclose(tensors(tmp_path / "out")[name].ravel(), restated, atol=1e-7)


def test_merged_weights_of_runs_do_their_tasks(tmp_path: Path) -> None:
    """Of two equal models: the same predictions."""
    save_model(tmp_path / "one")
    merge_checkpoints([tmp_path / "one"] * 2, tmp_path / "out", MergeOptions())
    assert read_info(tmp_path / "out" / INFO).made_by["merged"]["weights"] == [0.5, 0.5]
    opened, merged = open_model(tmp_path / "one"), open_model(tmp_path / "out")
    for name, entry in opened.entries.items():
        torch.testing.assert_close(merged.entries[name].read(), entry.read(), rtol=0, atol=0)
    rows = [row["text_a"] for row in texts(5)]
    found = [palm.load(tmp_path / x).predict(rows, task="mood") for x in ("one", "out")]
    assert found[0] == found[1] and found[0]


def test_the_checkpoints_of_a_run_come_oldest_first(tmp_path: Path) -> None:
    for step in (10, 200, 30):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    steps = [path.name for path in sources_of([tmp_path / "run"])]
    assert steps == ["step_00000010", "step_00000030", "step_00000200"]
    assert [path.name for path in sources_of([tmp_path / "run"], last=2)] == steps[1:]
    with pytest.raises(UserError, match="last: chooses among the checkpoints of one run"):
        sources_of([tmp_path / "run", tmp_path], last=2)
    with pytest.raises(UserError, match="last: expected a number of checkpoints, got -1"):
        sources_of([tmp_path / "run"], last=-1)
    with pytest.raises(UserError, match="last, best: both choose"):
        sources_of([tmp_path / "run"], last=2, best=2)
    with pytest.raises(UserError, match="best: chooses among the checkpoints of one run"):
        sources_of([tmp_path / "run", tmp_path], best=2)
    with pytest.raises(UserError, match="has no checkpoints to merge; name a run"):
        sources_of([tmp_path])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": (1.0,)}, "weights: 1 number for 3 checkpoints"),
        ({"weights": (1.0, -1.0, 1.0)}, "weights.1: expected 0 or more, got -1.0"),
        ({"weights": (0.0, 0.0, 0.0)}, "weights: all are 0"),
        ({"method": "slerp"}, "slerp interpolates between two checkpoints, got 3"),
        ({"method": "ties"}, "base: ties needs the checkpoint that all sources were trained from"),
        ({"base": Path("x")}, "base: is for ties, not mean"),
        ({"method": "ema", "weights": (1.0, 1.0, 1.0)}, "weights: are not for ema"),
        ({"decay": 1.0}, "decay: expected a number below 1, got 1.0"),
        ({"decay": 0.5}, "decay: is for ema, not mean"),
        ({"method": "ema", "scale": 2.0}, "scale: is for ties, not ema"),
        ({"density": 0.0}, "density: expected a number above 0, got 0.0"),
        ({"scale": float("nan")}, "scale: expected a finite number, got NaN"),
    ],
)
def test_settings_that_do_not_fit(
    folders: list[Path], tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        merge_checkpoints(folders, tmp_path / "out", MergeOptions(**settings))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 41}, r"backbone.word.weight is \[41, 8\], but \[40, 8\] in "),
        ({"num_hidden_layers": 2}, "has no tensor backbone.layers.1."),
        ({"num_attention_heads": 4}, "num_heads is 4, but 2 in "),
        ({"hidden_act": "relu"}, "activation is relu, but gelu in "),
    ],
)
def test_other_shapes_are_refused(
    folders: list[Path], tmp_path: Path, sizes: dict[str, Any], message: str
) -> None:
    BertForMaskedLM(BertConfig(**{**BERT, **sizes})).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=message):
        merge_checkpoints([folders[0], tmp_path / "other"], tmp_path / "out", MergeOptions())
    assert not (tmp_path / "out").exists()


def test_what_outputs_mean_is_equal(folders: list[Path], tmp_path: Path) -> None:
    """The merged model has one unit of numbers, and one matrix after the encoder."""
    for name, change in (("one", {}), ("other", {"mean": 750.0, "deviation": 461.0})):
        folder = save_model(tmp_path / name, ["size"]) / "weights"
        info = read_info(folder / INFO)
        heads = {"size": replace(info.heads["size"], **change)}
        write_info(folder, replace(info, heads=heads))
    with pytest.raises(UserError, match="other.*: mean of head size is 750.0, but 0.0 in .*one"):
        merge_checkpoints([tmp_path / "one", tmp_path / "other"], tmp_path / "m", MergeOptions())
    for name, value in (("a", 1.0), ("b", -1.0)):
        shutil.copytree(folders[0], tmp_path / name)
        (tmp_path / name / "1_Dense").mkdir()
        kinds = {"": "Transformer", "1_Dense": "Dense"}
        write_json(
            tmp_path / name / "modules.json",
            [
                {
                    "idx": i,
                    "name": str(i),
                    "path": place,
                    "type": f"sentence_transformers.models.{x}",
                }
                for i, (place, x) in enumerate(kinds.items())
            ],
        )
        sizes = {"in_features": 8, "out_features": 4, "bias": False}
        write_json(tmp_path / name / "1_Dense/config.json", sizes)
        weights = {"linear.weight": torch.full((4, 8), value)}
        save_file(weights, tmp_path / name / "1_Dense/model.safetensors")
    with pytest.raises(UserError, match="b: 1_Dense/model.safetensors differs from that in .*a; "):
        merge_checkpoints([tmp_path / "a", tmp_path / "b"], tmp_path / "m", MergeOptions())
    merge_checkpoints([tmp_path / "a"] * 2, tmp_path / "m", MergeOptions())
    kept = load_file(tmp_path / "m/1_Dense/model.safetensors")["linear.weight"]
    assert torch.equal(kept, torch.ones(4, 8))


def test_heads_that_read_something_else_are_refused(tmp_path: Path) -> None:
    """Those of means and of the pooler have the same shapes."""
    for name in ("mean", "pooler"):
        mood = {"kind": "classification", "source": "texts", "pooling": name}
        save_model(tmp_path / name, ["mood"], tasks={"mood": mood})
    folders = [tmp_path / "mean", tmp_path / "pooler"]
    with pytest.raises(UserError, match="head mood was trained with `pooling: mean` in one"):
        merge_checkpoints(folders, tmp_path / "merged", MergeOptions())
