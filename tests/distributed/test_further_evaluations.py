"""Minimal pairs and a probe that a run scores while it trains: the same on any processes, and the
run stays as it is without them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.held_out_loss import score_minimal_pairs
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.runtime.checkpoint.checkpoint import folder_name, steps_in
from palm_ds.train.evaluate.probe import fit_linear
from palm_ds.train.report.html_report import write_report
from palm_ds.train.report.metrics_file import read_metrics
from palm_ds.weights.convert.merge import sources_of
from tests.distributed.test_commands import MASKS, losses, write_recipe
from tests.distributed.test_phases import train
from tests.helpers.small_corpus import write_small_corpus

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TITLE, PROBE = f"{MASKS} (minimal pairs)", f"{MASKS} (probe)"


def write_pairs(folder: Path) -> None:
    """Two paradigms, the second with a pair of the same words."""
    rng = np.random.default_rng(4)
    lines = [" ".join(f"w{i}" for i in rng.integers(0, 60, rng.integers(2, 9))) for _ in range(30)]
    (folder / "first.txt").write_text("\n".join(lines[:24]))
    rows = [{"sentence_good": lines[24], "sentence_bad": lines[24]}]
    rows += [{"sentence_good": lines[i], "sentence_bad": lines[i + 1]} for i in (25, 27)]
    (folder / "second.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_rows(file: Path, rows: int, seed: int) -> list[tuple[str, int]]:
    """Texts with one of three words at a place that varies, which is the class."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(rows):
        words = [f"w{i}" for i in rng.integers(3, 60, rng.integers(3, 20))]
        words[rng.integers(len(words))] = f"w{number % 3}"
        made.append((" ".join(words), number % 3))
    file.write_text("".join(f"{text}\t{label}\n" for text, label in [("text_a", "label"), *made]))
    return made


def scores_of(run: Path, title: str = TITLE) -> list[dict]:
    return [record["scores"][title] for record in read_metrics(run / "metrics.jsonl").evaluations]


@pytest.mark.parametrize(
    "score", ["unmasked", pytest.param("masked", marks=pytest.mark.exhaustive)]
)
def test_a_run_scores_them_at_every_evaluation(tmp_path: Path, score: str) -> None:
    corpus = write_small_corpus(tmp_path / "corpus").path
    write_pairs(tmp_path)
    files = [str(tmp_path / "first.txt"), str(tmp_path / "second.*")]
    settings = {"examples": 20, "every": 4}
    how = {
        "tasks": {MASKS: {"source": "text"}},
        "stages": [{MASKS: 8}],
        "optimizer": {"lr": 2e-2},
        "backbone": {"preset": "tiny", "hidden_size": 64, "max_positions": 64, "dropout": 0.1},
    }
    train(
        write_recipe(tmp_path, corpus, evaluate=settings, **how),
        tmp_path / "without",
        world=1,
        stage=0,
    )
    fitted, tested = (write_rows(tmp_path / f"{n}.tsv", n, seed=n) for n in (90, 50))
    probe = {"table": str(tmp_path / "90.tsv"), "validation": str(tmp_path / "50.tsv")}
    settings = settings | {"pairs": files, "pair_score": score, "probe": probe}
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
    mine, its = scores_of(tmp_path / "one"), scores_of(tmp_path / "two")
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

    mine, its = scores_of(tmp_path / "one", PROBE), scores_of(tmp_path / "two", PROBE)
    assert len(mine) == len(its) == 2 and mine[0]["loss"] != mine[1]["loss"]
    for one, other in zip(mine, its, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.021)
        assert one["count"] == 50 and one["tables"]["rows"][1] == [3, 90, 50]
    embedder = TrainedModel.open(tmp_path / "one").embedder(EmbeddingSettings(pooling="mean"))
    vectors = [embedder.embed([text for text, _ in rows]) for rows in (fitted, tested)]
    labels = [np.array([label for _, label in rows]) for rows in (fitted, tested)]
    found = fit_linear(vectors[0].astype(float), labels[0], 3)(vectors[1]).argmax(1)
    assert mine[-1]["accuracy"] == pytest.approx((found == labels[1]).mean(), abs=0.021)
    assert mine[-1]["metrics"]["accuracy"] == mine[-1]["accuracy"] > 0.5
    assert mine[-1]["baseline_accuracy"] == 17 / 50
    assert f"<h3>{PROBE}</h3>" in page


def test_the_best_checkpoints_stay_after_a_kill(tmp_path: Path) -> None:
    """With another number of processes, too."""
    corpus, run = write_small_corpus(tmp_path / "corpus").path, tmp_path / "run"
    recipe = write_recipe(
        tmp_path,
        corpus,
        tasks={MASKS: {"source": "text"}},
        stages=[{MASKS: 8}],
        optimizer={"lr": 5e-2},  # the loss rises at first
        schedule={"kind": "constant"},
        evaluate={"every": 1, "examples": 20},
        save={"every": 2, "keep": 1, "best": 2},
    )
    train(recipe, run, world=2, stage=2, killed=5)
    train(recipe, run, world=1, stage=0)
    evaluations = read_metrics(run / "metrics.jsonl").evaluations
    found = {x["step"]: x["scores"][MASKS]["loss"] for x in evaluations if x["step"] % 2 == 0}
    best = sorted(sorted(found, key=found.__getitem__)[:2])
    assert list(found) == [2, 4, 6, 8] and min(best) < 5
    assert sorted(steps_in(run / "checkpoints")) == sorted({*best, 8})
    assert [folder.name for folder in sources_of([run], best=2)] == list(map(folder_name, best))


def test_pairs_alone_are_an_evaluation(tmp_path: Path) -> None:
    """Nothing is held out. Here each word is masked in turn."""
    corpus = write_small_corpus(tmp_path / "corpus").path
    write_pairs(tmp_path)
    pairs = str(tmp_path / "first.txt")
    recipe = write_recipe(
        tmp_path,
        corpus,
        held_out=0.0,
        tasks={MASKS: {"source": "text"}},
        stages=[{MASKS: 4}],
        evaluate={"every": 2, "pairs": pairs, "pair_score": "masked"},
    )
    train(recipe, tmp_path / "run", world=1, stage=0)
    found = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations
    assert [[record["step"], *record["scores"]] for record in found] == [[2, TITLE], [4, TITLE]]
    scores = score_minimal_pairs(TrainedModel.open(tmp_path / "run"), [pairs], "masked")
    assert found[-1]["scores"][TITLE]["loss"] == pytest.approx(scores.loss, rel=1e-4)
