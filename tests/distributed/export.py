"""One training, saved under each layout of this many processes.

    FOLDER/common                a few steps of the first launch; every engine below starts from it
    FOLDER/RUN/checkpoints       restored and saved again, no step taken
    FOLDER/RUN/shards            the same engine, saved by DeepSpeed itself
    FOLDER/RUN/later/checkpoints after the same few steps more

RUN is STAGE_PRECISION_PROCESSES.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from palm_ds.engine import Engine
from palm_ds.train.setup.extend import ModelSignature
from palm_ds.weights.formats.weights_info import WeightsInfo, write_info
from tests.distributed.tiny import make_engine, make_model, train

ROWS, MICRO, FIRST, LAST = 12, 2, 3, 6  # rows that 1, 2 and 3 processes share evenly
IDS, TOKEN_HEADS = {"words": 0, "order": 5, "later": 2}, ("later",)


def state(step: int) -> dict[str, Any]:
    model = make_model()
    signature = ModelSignature(
        backbone=model.backbone.config,
        task_ids=IDS,
        tokenizer="none",
        token_heads=TOKEN_HEADS,
        shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
    )
    return {"step": step, "signature": signature.record()}


def begin(folder: Path) -> None:
    engine = make_engine(1, micro=MICRO, rows=ROWS)
    train(engine, range(FIRST), rows=ROWS)
    engine.save(folder / "common", state(FIRST), step=FIRST)


def save(folder: Path, stage: int, precision: str) -> Engine:
    engine = make_engine(stage, precision, micro=MICRO, rows=ROWS)
    run = folder / f"{stage}_{precision}_{engine.world}"
    loaded = engine.load(folder / "common")
    assert loaded is not None and loaded["step"] == FIRST
    engine.save(run / "checkpoints", state(FIRST), step=FIRST)
    engine._engine.save_checkpoint(str(run / "shards"))
    if engine.rank == 0:
        info = WeightsInfo(
            backbone=make_model().backbone.config, task_ids=IDS, token_heads=TOKEN_HEADS
        )
        write_info(run / "shards", info)
    train(engine, range(FIRST, LAST), rows=ROWS)
    engine.save(run / "later" / "checkpoints", state(LAST), step=LAST)
    return engine


def layouts(folder: str, runs: list[str]) -> int:
    """Runs are written stage:precision. The number of processes."""
    if not (Path(folder) / "common").exists():
        begin(Path(folder))
    for run in runs:
        stage, precision = run.split(":")
        engine = save(Path(folder), int(stage), precision)
    return engine.world
