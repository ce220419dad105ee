"""Stages with settings of their own: one curve whatever the processes, ZeRO stage and restarts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_commands import MASKS, losses, records, write_machine, write_recipe
from tests.distributed.test_divergence import KILLED, PRETRAIN, SPIKING
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import clear_away, start_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT, SECONDS = Path(__file__).parents[2], 300
APART = "sentence_distance"
PHASES: list[dict[str, Any]] = [
    {MASKS: 6, "rate": 0.3},
    {
        f"{APART} + {MASKS}": 6,
        "lr": 2e-3,
        "weight_decay": 0.5,
        "rate": [0.3, 0.15],
        "schedule": {"kind": "wsd", "warmup": 2, "decay": 3, "shape": "1-sqrt"},
    },
    {MASKS: 6, "freeze": ["backbone.layers.0.*"], "schedule": {"kind": "cosine", "end": 0.1}},
]


BY_SIZE: list[dict[str, Any]] = [
    {MASKS: 5, "length": 32, "rate": [0.3, 0.15], "rope_base": 1e4, "local_rope_base": 2e3},
    {
        f"{APART} + {MASKS}": 7,
        "batch": {"start": "4 rows", "end": "12 rows", "over": "3_072 tokens"},
        "rope_base": 2e4,
    },
    {MASKS: 6, "length": 128, "batch": "8 rows", "rate": 0.15},
]
"""Two steps each of 4 and 8 rows, then 12."""


KILLS = {  # (steps done, processes and ZeRO stage until then)
    "rates": ((4, 2, 3), (12, 1, 1)),
    "sizes": ((8, 2, 3), (12, 1, 1)),
}


def train(recipe: Path, run: Path, *, world: int, stage: int, killed: int = -1) -> Counter[str]:
    """Returns the rows of the steps it took: each a step and a hash of the tokens."""
    ds_config = write_machine(run.parent, zero_optimization={"stage": stage})
    words = [SPIKING, PRETRAIN, recipe, "--deepspeed_config", ds_config, "--run_dir", run]
    rows = run.parent / "rows"
    rows.write_text("")
    env = {"PYTHONPATH": str(ROOT), "PALM_TEST_KILLED_STEP": str(killed)}
    env["PALM_TEST_ROWS"] = str(rows)
    programs = start_together(world, words, env=env)
    try:
        output = programs[0].communicate(timeout=SECONDS)[0]
        assert programs[0].returncode == (KILLED if killed >= 0 else 0), output[-4000:]
    finally:
        clear_away(programs)
    return Counter(rows.read_text().splitlines())


def step_of(row: str) -> int:
    return int(row.split()[0])


def steps_of(rows: Counter[str]) -> set[int]:
    return {step_of(row) for row in rows}


@pytest.mark.parametrize("kind", ["rates", "sizes"])
def test_one_curve_across_switches(tmp_path: Path, kind: str) -> None:
    """Killed in the middle of a stage and exactly at a switch, resumed with other layouts: the same
    rows in every step, and the same losses."""
    write_small_corpus(tmp_path / "corpus")
    more: dict[str, Any] = {"stages": PHASES}
    if kind == "sizes":
        write_small_corpus(tmp_path / "other", documents=20)
        corpora = {str(tmp_path / name): 1 for name in ("corpus", "other")}
        own = {str(tmp_path / name): weight for name, weight in (("corpus", 1), ("other", 3))}
        mixed = {"mixture": {"text": own}, "sampling_exponent": 0.5, "evaluate_every": 4}
        stages = [BY_SIZE[0], {**BY_SIZE[1], **mixed}, BY_SIZE[2]]
        backbone = {"preset": "modern-tiny", "hidden_size": 32, "max_positions": 128}
        mix = {"text": {"mix": corpora}}
        more = {"stages": stages, "sources": mix, "backbone": backbone, "held_out": 0.2}
    recipe = write_recipe(
        tmp_path,
        tmp_path / "corpus",
        tasks={MASKS: {"source": "text"}, APART: {"source": "text"}},
        log={"every": 1},
        save={"every": 3},
        **{"held_out": 0.0, **more},
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rows, done = train(recipe, whole, world=1, stage=0), 0
    assert steps_of(rows) == {*range(18)}
    for killed, world, stage in (*KILLS[kind], (-1, 1, 2)):
        taken = train(recipe, broken, world=world, stage=stage, killed=killed)
        steps = steps_of(taken)
        assert min(steps) <= done and max(steps) == (killed if killed >= 0 else 18) - 1
        assert taken == Counter({row: n for row, n in rows.items() if step_of(row) in steps})
        done = killed
    mine, its = losses(whole), losses(broken)
    assert len(mine) == len(its) == 18
    for one, other in zip(mine, its, strict=True):
        assert one.keys() == other.keys()
        assert [*one.values()] == pytest.approx([*other.values()], abs=2e-6)
    rates = [[step["lr"] for step in records(run, "step")] for run in (whole, broken)]
    assert rates[0] == rates[1]
    assert kind == "sizes" or rates[0][6:12] != rates[0][:6]
    evaluated = [
        {each["step"]: each["scores"][MASKS]["loss"] for each in records(run, "evaluation")}
        for run in (whole, broken)
    ]
    assert {*evaluated[0]} == ({5, 8, 12, 18} if kind == "sizes" else set())
    assert evaluated[0] == pytest.approx(evaluated[1], abs=2e-6)
