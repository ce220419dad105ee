"""benchmarks/study.py: arms of equal FLOPs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import study
from tests.helpers.small_corpus import write_small_corpus

TINY = ["backbone={preset: tiny, hidden_size: 32, max_positions: 64}", "length=64"]
TINY += ["batch=1024 tokens", "held_out=0.2"]


@pytest.mark.parametrize("arm", ["masked_30_15", "with_sentence_distance", "random_distance"])
def test_every_arm_has_the_same_flops(arm: str, tmp_path: Path) -> None:
    """Also where a task has a head of its own, or several stages."""
    corpus = write_small_corpus(tmp_path / "corpus").path
    args = study.parse(
        ["--corpus", str(corpus), "--out", str(tmp_path), "--tokens", "5e5", "--set", *TINY]
    )
    budget = study.budget_of(tmp_path, args)
    run = study.Run(arm=arm, body="bert", seed=1, out=tmp_path)
    values = run.values(corpus, TINY)
    whole = study.flops_of(values)
    values["stages"] = study.scaled(values["stages"], values["tasks"], budget / whole)
    assert whole != pytest.approx(budget, rel=0.05)
    assert study.flops_of(values) == pytest.approx(budget, rel=0.01)


def test_stages_keep_their_settings() -> None:
    stages = [{"a + b": 10, "rate": [0.3, 0.15]}, {"a": 20, "lr": 1}]
    scaled = [{"a + b": 15, "rate": [0.3, 0.15]}, {"a": 30, "lr": 1}]
    assert study.scaled(stages, {"a": {}, "b": {}}, 1.5) == scaled


def test_a_page_gets_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{study.FIRST}\nold\n{study.LAST}\nafter\n")
    runs = [study.Run(arm="joint", body="bert", seed=seed, out=tmp_path) for seed in (1, 2, 3)]
    for run, loss in zip(runs, (2.0, 4.0), strict=False):  # the third is not there yet
        run.folder.mkdir(parents=True)
        run.measures.write_text(f'{{"flops": 1, "seconds": 1800, "masked": {loss}}}')
    study.write_table(page, study.table(runs))
    text = page.read_text()
    assert "| bert | joint | 2 | 3.000 ± 1.414 |" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith(f"{study.LAST}\nafter\n")
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="no lines"):
        study.write_table(page, "")
