"""Documents read with memories: one curve whatever the processes, ZeRO stage and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.shard_files import ShardReader
from tests.distributed.test_commands import losses, records, write_recipe
from tests.distributed.test_phases import train
from tests.end_to_end.test_ernie_doc_tasks import ANSWERS, CANDIDATES, write_long_tables
from tests.helpers.small_configs import ERNIE_DOC
from tests.helpers.small_corpus import write_small_corpus

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ORDER, WORDS = "segment_reordering", "knowledge_masking"
# The same layout is bit for bit the same; another one rounds otherwise.
LAYOUTS = [
    pytest.param(((9, 1, 2),), (2, 3), 1e-6, id="another layout"),
    pytest.param(((9, 1, 0),), (1, 0), 0.0, id="the same layout", marks=pytest.mark.exhaustive),
    pytest.param((), (2, 1), 1e-6, id="two from the start", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("killed", "last", "tolerance"), LAYOUTS)
def test_one_curve_for_any_layout(
    tmp_path: Path,
    killed: tuple[tuple[int, int, int], ...],
    last: tuple[int, int],
    tolerance: float,
) -> None:
    write_small_corpus(tmp_path / "corpus")
    changes = {
        "tasks": {ORDER: {"source": "text"}, WORDS: {"source": "text", "rate": 0.3}},
        "stages": [{f"{ORDER} + {WORDS}": 16}],
        "documents": {"counted": "all", "stride": 30},
    }
    check_one_curve(tmp_path, changes, (ORDER, WORDS), killed, last, tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("killed", "last", "tolerance"), LAYOUTS)
def test_one_curve_of_answers_and_ranking(
    tmp_path: Path,
    killed: tuple[tuple[int, int, int], ...],
    last: tuple[int, int],
    tolerance: float,
) -> None:
    changes = {**write_long_tables(tmp_path / "tables"), "documents": {"stride": 12}}
    check_one_curve(tmp_path, changes, (ANSWERS, CANDIDATES), killed, last, tolerance)


def check_one_curve(
    tmp_path: Path,
    changes: dict[str, Any],
    tasks: tuple[str, ...],
    killed: tuple[tuple[int, int, int], ...],
    last: tuple[int, int],
    tolerance: float,
) -> None:
    """Killed and resumed, against one process that was not: losses, held-out scores, and what the
    slots remember in the end."""
    recipe = write_recipe(
        tmp_path,
        tmp_path / "corpus",
        backbone=ERNIE_DOC,
        length=32,
        batch="4 rows",
        log={"every": 1},
        save={"every": 4},
        **changes,
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(recipe, whole, world=1, stage=0)
    for step, world, stage in killed:
        train(recipe, broken, world=world, stage=stage, killed=step)
    train(recipe, broken, world=last[0], stage=last[1])
    mine, its = losses(whole), losses(broken)
    assert len(mine) == len(its) == 16 and {*tasks} == {task for step in mine for task in step}
    for one, other in zip(mine, its, strict=True):
        assert [*one.values()] == pytest.approx([other[name] for name in one], abs=tolerance)
    scores = [records(run, "evaluation")[-1]["scores"] for run in (whole, broken)]
    for name in tasks:
        assert scores[0][name]["count"] == scores[1][name]["count"] > 0
        assert scores[0][name]["loss"] == pytest.approx(scores[1][name]["loss"], abs=2e-6)
    one, other = memories(whole), memories(broken)
    assert one.keys() == other.keys() and len(one) == 4
    for name, values in one.items():
        assert values.abs().max() > 0.1
        assert torch.allclose(values, other[name], rtol=0, atol=10 * tolerance)


def memories(run: Path) -> dict[str, torch.Tensor]:
    """{slot and document: what it remembers} in the newest checkpoint."""
    folder = run / "checkpoints"
    newest = folder / checkpoint.folder_name(checkpoint.steps_in(folder)[0])
    return ShardReader(checkpoint.open_published(newest).files).memories()
