"""Joint training and predictions from Python, in any number of processes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import palm_ds as palm
from palm_ds.train import export
from palm_ds.weights.convert.try_onnx import AddedOnnx
from tests.helpers.own_task import Counting, HowMany
from tests.helpers.small_tables import TINY

parser = argparse.ArgumentParser()
for name in ("--out", "--tables", "--folder"):
    parser.add_argument(name, type=Path)
parser.add_argument("--stages", type=int, nargs="+", help="with gradient checkpointing")
parser.add_argument("--onnx", choices=("real", "pretended"), help="pretended: in two seconds")
parser.add_argument("--local_rank")
given = parser.parse_args()


def pretend(folder: Path, *_: object) -> AddedOnnx:
    time.sleep(2)
    (folder / "onnx").mkdir()
    (folder / "onnx/model.onnx").write_bytes(b"a graph")
    return AddedOnnx()


if given.onnx == "pretended":
    export.try_onnx = pretend
tables = given.tables
classes = palm.tasks.Classification(dropout=0.0).on(
    train=tables / "train.tsv", dev=tables / "dev.tsv"
)
many = HowMany.on(train=Counting(24), dev=Counting(7), mix_ratio=2)
start = palm.Backbone.from_config(
    {**TINY, "dropout": 0, "attention_dropout": 0}, tokenizer=tables / "vocab.txt"
)
trainer = palm.MultiHeadTrainer(
    [classes, many],
    backbone=start,
    batch=8,
    epochs=1,
    lr=1e-3,
    length=32,
    folder=given.folder,
    recipe={"export_onnx": ["fp32"] if given.onnx else []},
    deepspeed_config={"zero_optimization": {"stage": 2}},
)
scores = trainer.train()
rows = [{"text_a": " ".join(f"w{k % 40}" for k in range(i, i + 1 + i % 5))} for i in range(9)]


def logits_of(stage: int, *, recomputed: bool) -> list[list[float]]:
    """Logits after training with dropout, with or without gradient checkpointing."""
    made = palm.Trainer(
        palm.tasks.Classification.on(train=tables / "train.tsv", dev=tables / "dev.tsv"),
        backbone=palm.Backbone.from_config(TINY, tokenizer=tables / "vocab.txt"),
        batch=8,
        epochs=1,
        lr=1e-3,
        length=32,
        folder=given.folder / f"stage_{stage}_{recomputed}",
        gradient_checkpointing=recomputed,
        deepspeed_config={"zero_optimization": {"stage": stage}},
        recipe={"export_onnx": []},
    )
    made.train()
    (found,) = made.predict(rows).values()
    return [each["logits"] for each in found]


result = {
    "scores": scores,
    "evaluated": trainer.evaluate(),
    "predictions": trainer.predict(rows),
    "steps": trainer.expected_steps,
    "recomputed": [logits_of(stage, recomputed=True) for stage in given.stages],
}
if 3 not in given.stages:  # which changes its process
    result["plain"] = logits_of(2, recomputed=False)
if trainer.first_process:
    given.out.write_text(json.dumps(result))
