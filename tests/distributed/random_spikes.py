"""Ruins runs in a random step, with a learning rate 1,000 to 100 million times too large (or other
`--powers` of ten): none may end with exit code 0 and a ruined model.

    python -m tests.distributed.random_spikes --runs 20 --out runs/random_spikes

Each run draws the step, the factor, `save`, `log.every` and what is to be done (`loss_spike.action`
and `nonfinite`). One that stops is started again in its folder, as its last line advises. A model
is ruined if its held-out loss is more than half a nat above that of a run without a spike.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palm_ds.common.errors import FINISHED, NONFINITE
from tests.distributed.test_commands import (
    MASKS,
    PRETRAIN,
    ROOT,
    SECONDS,
    records,
    write_machine,
    write_recipe,
)
from tests.helpers import warm_python
from tests.helpers.small_corpus import write_small_corpus

SPIKING = str(ROOT / "tests" / "distributed" / "spiking.py")
STEPS = 36
MOST_ABOVE = 0.5
"""Nats."""
POWERS = (3.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A run to be ruined."""

    step: int
    factor: float
    overrides: tuple[str, ...]

    @classmethod
    def random(cls, rng: random.Random, powers: Sequence[float]) -> Draw:
        factor, every = 10 ** rng.uniform(*powers), rng.randint(1, 15)
        overrides = {
            "save.every": every,
            "save.keep": rng.randint(1, 3),
            "save.background": rng.choice(["true", "false"]),
            "log.every": rng.randint(1, 10),
            "loss_spike.action": rng.choice(["warn", "warn", "stop", "rollback", "rollback"]),
            "nonfinite": rng.choice(["stop", "skip", "rollback"]),
        }
        given = tuple(f"{key}={value}" for key, value in overrides.items())
        return cls(step=rng.randrange(STEPS), factor=factor, overrides=given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--powers", type=float, nargs=2, default=POWERS, help="of ten: the factor")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    ends = ruin(args.out.absolute(), args.runs, args.seed, args.powers)
    print(json.dumps(dict(ends)))
    sys.exit(bool(ends["ruined"]))


def ruin(folder: Path, runs: int, seed: int, powers: Sequence[float] = POWERS) -> Counter[str]:
    """How many runs ended how; a line for each."""
    write_small_corpus(folder / "corpus")
    recipe = write_recipe(
        folder,
        folder / "corpus",
        tasks={MASKS: {"source": "text"}},
        stages=[{MASKS: STEPS}],
        schedule={"kind": "constant"},
        loss_spike={"window": 10},
    )
    command = [PRETRAIN, recipe, "--deepspeed_config", write_machine(folder)]
    code = start(command, folder / "whole")
    assert code == FINISHED
    limit, ends = held_out_loss(folder / "whole") + MOST_ABOVE, Counter[str]()
    for number in range(runs):
        draw, run = Draw.random(random.Random(f"{seed}/{number}"), powers), folder / f"run{number}"
        codes = [start([*command, *draw.overrides], run, step=draw.step, factor=draw.factor)]
        if codes[0] == NONFINITE:
            codes.append(start([*command, *draw.overrides], run))
        end = end_of(run, codes, limit)
        ends[end] += 1
        loss = held_out_loss(run) if codes[-1] == FINISHED else math.nan
        print(number, draw, codes, f"held-out loss {loss:.4g} of at most {limit:.4g}:", end)
    return ends


def start(command: list[Any], run: Path, step: int = -1, factor: float = 1.0) -> int:
    """The exit code. `factor`: of the learning rate in `step`."""
    variables = {"PALM_TEST_BAD_STEP": step, "PALM_TEST_BAD_FACTOR": factor, "PYTHONPATH": ROOT}
    given = {name: str(value) for name, value in variables.items()}
    words = [SPIKING, *command, "--run_dir", run]
    done = warm_python.run(words, env=given, timeout=SECONDS)
    with (run.parent / f"{run.name}.log").open("a") as log:
        log.write(done.stdout + done.stderr)
    return done.returncode


def held_out_loss(run: Path) -> float:
    """That of the final weights."""
    found = [record for record in records(run, "evaluation") if record["step"] == STEPS]
    return found[-1]["scores"][MASKS]["loss"]


def end_of(run: Path, codes: list[int], limit: float) -> str:
    """How a run ended: well, stopped and then well, stopped for good, or ruined."""
    if codes[-1] == FINISHED:
        good = held_out_loss(run) <= limit  # false for NaN
        return ("stopped, then good" if codes[1:] else "good") if good else "ruined"
    return "stopped" if codes[-1] == NONFINITE else f"exit code {codes[-1]}"


if __name__ == "__main__":
    main()
