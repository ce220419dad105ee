"""Minimal pairs that a run scores while it trains: the same on any processes, and the run stays as
it is without them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from palm_ds.inference.held_out_loss import score_minimal_pairs
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.train.report.html_report import write_report
from palm_ds.train.report.metrics_file import read_metrics
from tests.distributed.test_commands import MASKS, losses, write_recipe
from tests.distributed.test_phases import train
from tests.helpers.small_corpus import write_small_corpus

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TITLE = f"{MASKS} (minimal pairs)"


def write_pairs(folder: Path) -> None:
    """Two paradigms, the second with a pair of the same words."""
    rng = np.random.default_rng(4)
    lines = [" ".join(f"w{i}" for i in rng.integers(0, 60, rng.integers(2, 9))) for _ in range(30)]
    (folder / "first.txt").write_text("\n".join(lines[:24]))
    rows = [{"sentence_good": lines[24], "sentence_bad": lines[24]}]
    rows += [{"sentence_good": lines[i], "sentence_bad": lines[i + 1]} for i in (25, 27)]
    (folder / "second.jsonl").write_text("\n".join(map(json.dumps, rows)))


def pair_scores(run: Path) -> list[dict]:
    return [record["scores"][TITLE] for record in read_metrics(run / "metrics.jsonl").evaluations]


@pytest.mark.parametrize("score", ["unmasked", "masked"])
def test_a_run_scores_them_at_every_evaluation(tmp_path: Path, score: str) -> None:
    corpus = write_small_corpus(tmp_path / "corpus").path
    write_pairs(tmp_path)
    files = [str(tmp_path / "first.txt"), str(tmp_path / "second.*")]
    settings = {"examples": 20, "every": 4}
    how = {
        "tasks": {MASKS: {"source": "text"}},
        "stages": [{MASKS: 8}],
        "optimizer": {"lr": 2e-2},
        "backbone": {"preset": "tiny", "max_positions": 64, "dropout": 0.1},
    }
    train(
        write_recipe(tmp_path, corpus, evaluate=settings, **how),
        tmp_path / "without",
        world=1,
        stage=0,
    )
    settings = settings | {"pairs": files, "pair_score": score}
    recipe = write_recipe(tmp_path, corpus, evaluate=settings, **how)
    train(recipe, tmp_path / "one", world=1, stage=0)
    train(recipe, tmp_path / "two", world=2, stage=3)

    assert losses(tmp_path / "one") == losses(tmp_path / "without")
    held_out = [
        [
            record["scores"][MASKS]["loss"]
            for record in read_metrics(run / "metrics.jsonl").evaluations
        ]
        for run in (tmp_path / "one", tmp_path / "without")
    ]
    assert held_out[0] == held_out[1]
    mine, its = pair_scores(tmp_path / "one"), pair_scores(tmp_path / "two")
    assert len(mine) == len(its) == 2
    for one, other in zip(mine, its, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["tables"] == other["tables"] and one["count"] == other["count"] == 15
    assert mine[0]["loss"] != mine[1]["loss"]

    scores = score_minimal_pairs(TrainedModel.open(tmp_path / "one"), files, score)  # type: ignore[arg-type]
    last = mine[-1]
    assert last["loss"] == pytest.approx(scores.loss, rel=1e-4)
    assert last["accuracy"] == last["metrics"]["accuracy"] == pytest.approx(scores.mean)
    assert last["tables"]["paradigms"] == [
        ["paradigm", "pairs", "accuracy"],
        *([name, each.pairs, each.accuracy] for name, each in scores.paradigms.items()),
    ]
    assert last["baseline_accuracy"] == 0.5 and last["baseline_loss"] is None
    page = write_report(tmp_path / "one").read_text()
    assert f"<h3>{TITLE}</h3>" in page and f"<h3>{TITLE}: paradigms</h3>" in page


def test_pairs_alone_are_an_evaluation(tmp_path: Path) -> None:
    """Nothing is held out."""
    corpus = write_small_corpus(tmp_path / "corpus").path
    write_pairs(tmp_path)
    recipe = write_recipe(
        tmp_path,
        corpus,
        held_out=0.0,
        tasks={MASKS: {"source": "text"}},
        stages=[{MASKS: 4}],
        evaluate={"every": 2, "pairs": str(tmp_path / "first.txt")},
    )
    train(recipe, tmp_path / "run", world=1, stage=0)
    found = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations
    assert [[record["step"], *record["scores"]] for record in found] == [[2, TITLE], [4, TITLE]]
