"""What DeepSpeed costs: the same model and steps under the engine and in a plain torch loop.

    python benchmarks/engine_overhead.py            # ZeRO 0, 1, 2 and 3, a table at the end

One process, 4,096 tokens a step (32 rows of 128), 4 layers of width 256, 30,522 words, fp32, the
kernels that a run would choose here, torch AdamW, clipping. The two take turns, a step each, so
that both meet the same machine; the figure is the median of the ratios.

Every stage has a process of its own. ZeRO 3 changes the process it runs in (it replaces F.linear):
its plain loop runs before the engine is there, so that its ratio is less sure than the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from palm_ds.data.tasks.example import Example, collate
from palm_ds.engine import Engine
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels, choose_kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from palm_ds.runtime.optimizer.param_groups import param_groups

ROWS, LENGTH, WORDS, MASKED = 32, 128, 30_522, 19
WARM = 3  # first steps, not counted
OPTIMIZER = OptimizerConfig(lr=1e-4)
CONFIG = EncoderConfig(vocab_size=WORDS, hidden_size=256, num_layers=4, num_heads=4)


def build_model(kernels: Kernels) -> Model:
    torch.manual_seed(0)
    backbone = build_encoder(CONFIG, kernels)
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(256, 9, pooled=True)}
    return Model(backbone, heads, {name: name for name in heads})


def make_batch(step: int) -> Batch:
    rng = np.random.default_rng(step)
    rows = []
    for _ in range(ROWS):
        ids = rng.integers(5, WORDS, LENGTH)
        nothing = np.zeros(LENGTH, np.int64)
        example = Example(
            input_ids=ids, token_type_ids=nothing, source_offsets=np.arange(LENGTH), annotations={}
        )
        at = rng.choice(LENGTH, MASKED, replace=False)
        example.labels["words"] = (at, ids[at].copy())
        example.labels["order"] = (np.array([0]), rng.integers(0, 9, 1))
        rows.append([(example, 0)])
    return collate(rows, length=LENGTH, pad=0)


def plain_step(kernels: Kernels) -> Callable[[Batch, int], None]:
    """What one would write without DeepSpeed, with the same checks."""
    model = build_model(kernels).train()
    groups = param_groups(model, OPTIMIZER.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, fused=True)

    def step(batch: Batch, _number: int) -> None:
        optimizer.zero_grad()
        outputs = model(batch)
        losses = [output.loss_sum / len(batch.labels[t][0]) for t, output in outputs.items()]
        torch.stack(losses).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        if torch.isfinite(norm):
            optimizer.step()

    return step


def engine_step(stage: int, kernels: Kernels) -> Callable[[Batch, int], None]:
    values = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": ROWS}
    ds_config = make_ds_config(values)
    model = build_model(kernels)
    engine = Engine(model, ds_config=ds_config, optimizer=OPTIMIZER, rows=ROWS, seed=1)
    return lambda batch, number: void(engine.step([batch], OPTIMIZER.lr, number))


def void(_value: object) -> None:
    return None


def measure(stage: int, rounds: int, kernels: Kernels) -> dict[str, float]:
    """Medians over rounds of one step each: seconds of both, and the ratio in time and in the
    processor's time, which other programs on the machine disturb less."""
    batches = [make_batch(number) for number in range(rounds)]
    steps: dict[str, Callable[[Batch, int], None]] = {"plain": plain_step(kernels)}
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "engine": []}

    def run(name: str, number: int) -> None:
        started = time.perf_counter(), time.process_time()
        steps[name](batches[number], number)
        times[name].append((time.perf_counter() - started[0], time.process_time() - started[1]))

    if stage == 3:
        for number in range(rounds):
            run("plain", number)
    steps["engine"] = engine_step(stage, kernels)
    for number in range(rounds):
        names = ["engine"] if stage == 3 else [["plain", "engine"], ["engine", "plain"]][number % 2]
        for name in names:
            run(name, number)
    pairs = list(zip(times["plain"], times["engine"], strict=True))[WARM:]
    return {
        "plain": statistics.median(plain[0] for plain, _ in pairs),
        "engine": statistics.median(engine[0] for _, engine in pairs),
        "ratio": statistics.median(engine[0] / plain[0] for plain, engine in pairs),
        "processor": statistics.median(engine[1] / plain[1] for plain, engine in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=43, help="steps of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--stage", type=int, help="measure one here and print JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.stage is not None:
        kernels, _ = choose_kernels({}, device="cpu", dtype=torch.float32, config=CONFIG)
        print(json.dumps(measure(options.stage, options.rounds, kernels)))
        return
    print(f"{'':8}{'plain ms':>10}{'engine ms':>11}{'ratio':>8}{'processor':>11}")
    for stage in options.stages:
        command = [sys.executable, __file__, "--stage", str(stage)]
        command += ["--rounds", str(options.rounds), "--threads", str(options.threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        got = json.loads(done.stdout.splitlines()[-1])
        print(
            f"ZeRO {stage:<3}{1e3 * got['plain']:10.0f}{1e3 * got['engine']:11.0f}"
            f"{got['ratio']:8.3f}{got['processor']:11.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
