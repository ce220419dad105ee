"""How long training stands still for a checkpoint: written in the foreground and in the background.

    python benchmarks/checkpoints.py                   # base shape: 12 layers of 768, 1.3 GB
    python benchmarks/checkpoints.py --shape small --tokens 512

One process, with AdamW; on a GPU bf16 under ZeRO 1. The two ways take turns within one run, so that
both meet the same machine. Seconds, and in units of a step without a checkpoint:

    stall   the calls that save: start_save and finish_save, or save
    slower  what the steps took longer while the file was written

The first checkpoint in the background also allocates its memory and is shown apart. The disk is
that of --folder (default: a temporary folder).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from palm_ds.data.tasks.example import Example, collate
from palm_ds.engine import Engine, start
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import choose_kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from palm_ds.runtime.step.gradient_accumulation import StepResult

LENGTH, WORDS = 128, 30_522
SHAPES = {"small": (64, 2), "base": (768, 12), "large": (1024, 24)}
"""{name: (width, layers)}; heads are 64 wide."""
OPTIMIZER = OptimizerConfig(lr=1e-4)


@dataclass
class Trainer:
    """An engine on batches of one size, and the seconds of its steps."""

    engine: Engine
    batches: list[Batch]
    step: int = 0
    seconds: list[float] = field(default_factory=list)

    def train(self) -> StepResult:
        started = time.perf_counter()
        result = self.engine.step(self.batches, OPTIMIZER.lr, self.step)
        self.engine.reduce(result.loss_sums)  # waits for the device
        self.seconds.append(time.perf_counter() - started)
        self.step += 1
        return result


def build(shape: str, tokens: int) -> Trainer:
    gpu = torch.cuda.is_available()
    rows, (width, layers) = tokens // LENGTH, SHAPES[shape]
    values = {"zero_optimization": {"stage": int(gpu)}, "bf16": {"enabled": gpu}}
    ds_config = make_ds_config({**values, "train_micro_batch_size_per_gpu": rows})
    device = start(ds_config).device
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=WORDS, hidden_size=width, num_layers=layers, num_heads=width // 64
    )
    dtype = torch.bfloat16 if gpu else torch.float32
    kernels, _ = choose_kernels({}, device=device.type, dtype=dtype, config=config)
    backbone = build_encoder(config, kernels)
    model = Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"})
    engine = Engine(model, ds_config=ds_config, optimizer=OPTIMIZER, rows=rows, seed=1)
    return Trainer(engine, [make_batch(rows)])


def make_batch(rows: int) -> Batch:
    rng, out = np.random.default_rng(0), []
    for _ in range(rows):
        ids = rng.integers(5, WORDS, LENGTH)
        example = Example(
            input_ids=ids,
            token_type_ids=np.zeros(LENGTH, np.int64),
            source_offsets=np.arange(LENGTH),
            annotations={},
        )
        at = rng.choice(LENGTH, LENGTH * 15 // 100, replace=False)
        example.labels["words"] = (at, ids[at].copy())
        out.append([(example, 0)])
    return collate(out, length=LENGTH, pad=0)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def foreground(trainer: Trainer, folder: Path) -> dict[str, float]:
    return {"stall": timed(lambda: trainer.engine.save(folder, {}, step=trainer.step))}


def background(trainer: Trainer, folder: Path) -> dict[str, float]:
    """One checkpoint, and the steps until it was written."""
    engine, usual = trainer.engine, statistics.median(trainer.seconds)
    stall = timed(lambda: engine.start_save(folder, {}, step=trainer.step))
    before = len(trainer.seconds)
    while not trainer.train().checkpoint_written:
        pass
    stall += timed(engine.finish_save)
    during = trainer.seconds[before:]
    del trainer.seconds[before:]
    return {"stall": stall, "slower": sum(during) - usual * len(during), "steps": len(during)}


def measure(trainer: Trainer, folder: Path, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    trainer.train()  # not counted: it allocates and compiles
    trainer.seconds.clear()
    ways: dict[str, list[dict[str, float]]] = {"foreground": [], "background": []}
    for _ in range(rounds + 1):
        for _ in range(steps):
            trainer.train()
        ways["foreground"].append(foreground(trainer, folder / "foreground"))
        trainer.train()
        ways["background"].append(background(trainer, folder / "background"))
    medians = {
        name: {key: statistics.median(one[key] for one in found[1:]) for key in found[0]}
        for name, found in ways.items()
    }
    newest = (
        folder / "background" / f"step_{trainer.step - int(ways['background'][-1]['steps']):08}"
    )
    size = sum(file.stat().st_size for file in newest.iterdir())
    step = {"seconds": statistics.median(trainer.seconds), "checkpoint GB": size / 1e9}
    return {"step": step, "first in the background": ways["background"][0], **medians}


def show(found: dict[str, dict[str, float]]) -> None:
    step = found["step"]["seconds"]
    print(f"a checkpoint of {found['step']['checkpoint GB']:.2f} GB; a step takes {step:.3f} s")
    print(f"{'':24}{'stall':>10}{'':12}{'slower':>10}")
    for name, values in found.items():
        named = [values[key] for key in ("stall", "slower") if key in values]
        if named:
            line = "".join(f"{x:9.2f} s{x / step:6.2f} steps" for x in named)
            print(f"{name:24}{line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="between checkpoints")
    parser.add_argument("--rounds", type=int, default=2, help="checkpoints of each way, after one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trainer = build(options.shape, options.tokens)
        found = measure(trainer, Path(folder), options.rounds, options.steps)
        trainer.engine.close()
    show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
