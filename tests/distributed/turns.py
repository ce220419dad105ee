"""The two examples of docs/turns.md on the engine, each with two tasks that take turns, and plain
torch with two optimizers.

A run (example, stage, first, last) trains the steps [first, last) and saves before and after; one
that starts above 0 continues from the checkpoint of its example under the stage `source`. `kill`
ends the process by SIGKILL in the last run, before that step.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.data.stream.stages import Stage, order_of
from palm_ds.data.tasks.example import Example, collate, join
from palm_ds.engine import Engine
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.embedding import ContrastiveHead, VectorSettings
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from palm_ds.runtime.optimizer.param_groups import AllBut, is_selected
from palm_ds.runtime.optimizer.step_settings import TaskOptimizerSettings
from tests.distributed.tiny import REPORTS, SEED, WORDS

PAGE = Path(__file__).resolve().parents[2] / "docs/turns.md"
ROWS, STEPS, LENGTH, WIDTH = 8, 8, 24, 16
USUAL = OptimizerConfig(lr=2e-3, weight_decay=0.1, clip=0.5)


@dataclass(frozen=True)
class Part:
    """A task: what it trains, and how."""

    trains: tuple[str, ...]
    own: TaskOptimizerSettings

    @property
    def frozen(self) -> AllBut:
        return AllBut(self.trains)


EXAMPLES = {
    "gan": {
        "judge": Part(
            ("heads.judge.D.*",),
            TaskOptimizerSettings(lr=8e-3, betas=(0.5, 0.999), clip=0.05),
        ),
        "fool": Part(("heads.judge.G.*",), TaskOptimizerSettings(betas=(0.0, 0.9), clip=0.0)),
    },
    "ranking": {
        "words": Part(
            ("backbone.word.*",), TaskOptimizerSettings(lr=4e-3, weight_decay=0.3, eps=1e-4)
        ),
        "rest": Part(("backbone.layers.*", "backbone.*norm.*"), TaskOptimizerSettings()),
    },
}


@cache
def gan() -> ModuleType:
    """gan.py of the page."""
    blocks = re.findall(r"^```python\n(# gan\.py\n.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    module = ModuleType("gan")
    exec(compile(blocks[0], str(PAGE), "exec", dont_inherit=True), vars(module))
    return module


def make_model(example: str) -> Model:
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=2,
        max_positions=LENGTH,
        dropout=0.0,
        attention_dropout=0.0,
    )
    backbone = build_encoder(config, Kernels(attention="tiles", dropout="counter"))
    first, second = EXAMPLES[example]
    head = ContrastiveHead(VectorSettings(), margin=0.1, temperature=0.5)
    if example == "gan":
        head = gan().Adversaries(WIDTH)
    return Model(backbone, {first: head}, {first: first, second: first})


def task_of(example: str, step: int) -> str:
    first, second = EXAMPLES[example]
    stage = Stage(((first, STEPS // 4 * 3), (second, STEPS // 4)), "turns", 0)
    return (first, second)[order_of(stage, 0, SEED)[step]]


def text(rng: np.random.Generator) -> Example:
    size = int(rng.integers(3, 8))
    ids, nothing = rng.integers(5, WORDS, size), np.zeros(size, np.int64)
    return Example(
        input_ids=ids, token_type_ids=nothing, source_offsets=np.arange(size), annotations={}
    )


def row(example: str, step: int, number: int) -> Example:
    """A text with noise; or a query, its positive and a negative."""
    rng, task = np.random.default_rng([step, number]), task_of(example, step)
    if example == "gan":
        made = text(rng)
        (gan().Fool if task == "fool" else gan().Judge)(name=task).label(made, None, rng)
        return made
    made = join([text(rng) for _ in range(3)])
    targets = np.stack([np.arange(3), 3 * number + np.arange(3), np.zeros(3, np.int64)], 1)
    made.labels[task] = np.cumsum([0, *made.sub_lengths[:-1]]), targets
    made.grouped_labels.add(task)
    return made


def share(example: str, step: int, rank: int, world: int, micro: int) -> list[Batch]:
    size = ROWS // world
    return [
        collate(
            [[(row(example, step, n), 0)] for n in range(first, first + micro)],
            length=LENGTH,
            pad=0,
        )
        for first in range(rank * size, (rank + 1) * size, micro)
    ]


def build(example: str, stage: int) -> Engine:
    values = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2}
    return Engine(
        make_model(example),
        ds_config=make_ds_config(values),
        optimizer=USUAL,
        rows=ROWS,
        seed=SEED,
        freezable=[part.frozen for part in EXAMPLES[example].values()],
    )


State = dict[str, torch.Tensor]


def train_step(engine: Engine, example: str, step: int, before: State) -> tuple[float, State]:
    """The loss and the weights; what the step does not train is the same bit for bit."""
    task = task_of(example, step)
    part = EXAMPLES[example][task]
    lr = part.own.lr or USUAL.lr
    decay = 1.0 if part.own.weight_decay is None else part.own.weight_decay / USUAL.weight_decay
    batches = share(example, step, engine.rank, engine.world, engine.micro_rows)
    settings: dict[str, Any] = {"decay_scale": decay, "own": part.own.of_step}
    result = engine.step(batches, lr, step, frozen=[part.frozen], **settings)
    sums = engine.reduce(result.loss_sums)
    after = engine.full_state_dict()
    for name, value in before.items():
        same = torch.equal(value, after[name])
        assert same == is_selected(name, part.frozen), (example, step, name)
    return sums[task] / result.counts[task], after


def run(
    example: str, stage: int, first: int, last: int, source: int, *, folder: Path, kill: int
) -> dict[str, Any]:
    engine = build(example, stage)
    if first:
        loaded = engine.load(folder / f"{example} {source}", at_most=first)
        assert loaded == {"step": first}
    losses, state = [], engine.full_state_dict()
    for step in range(first, last):
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        loss, state = train_step(engine, example, step, state)
        losses.append(loss)
        if not first and step + 1 == STEPS // 2:
            engine.save(folder / f"{example} {stage}", {"step": step + 1}, step=step + 1)
    counts = engine._state.local().update_counts()
    engine.release()
    return {"losses": losses, "updates": counts}


def curves(
    folder: str, runs: Sequence[Sequence[Any]], kill: int = -1, compared: bool = False
) -> dict[str, Any]:
    """`runs`: (example, stage, first step, last step, stage of the checkpoint). `compared`: with
    the losses of plain torch."""
    last = len(runs) - 1
    found = [
        run(*each, folder=Path(folder), kill=kill if n == last else -1)
        for n, each in enumerate(runs)
    ]
    hand = {example: plain_loop(example) for example in EXAMPLES if compared and REPORTS}
    return {"runs": found, "by hand": hand}


def plain_loop(example: str) -> list[float]:
    """Each part has an optimizer of its own, which alone is stepped in its turns."""
    model, losses = make_model(example), []
    optimizers = {task: _plain_optimizer(model, part) for task, part in EXAMPLES[example].items()}
    for step in range(STEPS):
        task = task_of(example, step)
        (batch,) = share(example, step, 0, 1, ROWS)
        loss = _gan_loss(model, batch, task) if example == "gan" else _rank_loss(model, batch, task)
        model.zero_grad()
        loss.backward()
        own, optimizer = EXAMPLES[example][task].own, optimizers[task]
        clip = USUAL.clip if own.clip is None else own.clip
        if clip:
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _plain_optimizer(model: Model, part: Part) -> torch.optim.AdamW:
    own = part.own
    trained = [(n, p) for n, p in model.named_parameters() if not is_selected(n, part.frozen)]
    decay = USUAL.weight_decay if own.weight_decay is None else own.weight_decay
    decays = [p.ndim == 2 and n.startswith("backbone.") for n, p in trained]
    groups = [
        {"params": [p], "weight_decay": decay if d else 0.0}
        for (_, p), d in zip(trained, decays, strict=True)
    ]
    betas, eps = own.betas or USUAL.betas, own.eps or USUAL.eps
    return torch.optim.AdamW(groups, lr=own.lr or USUAL.lr, betas=betas, eps=eps)


def _gan_loss(model: Model, batch: Batch, task: str) -> torch.Tensor:
    """As the page's, with two losses written out."""
    positions, targets = batch.labels[task]
    head, encoder = model.heads["judge"], model.backbone
    assert isinstance(encoder.pooler, nn.Module)
    with torch.no_grad():
        real = encoder.pooler(encoder(batch).flatten(0, 1)[positions])
    made = head.D(head.G(targets[:, 1:]))  # type: ignore[operator]
    ones = torch.ones_like(made)
    loss = F.binary_cross_entropy_with_logits
    if task == "fool":
        return loss(made, ones)
    return loss(head.D(real), ones) + loss(made, 0 * ones)  # type: ignore[operator]


def _rank_loss(model: Model, batch: Batch, task: str) -> torch.Tensor:
    """InfoNCE over the texts of the step, whose vectors are means over their tokens."""
    encoded, vectors = model.backbone(batch).flatten(0, 1), []
    for begin, size in zip(batch.labels[task][0].tolist(), _sizes(task, batch), strict=True):
        vectors.append(F.normalize(encoded[begin : begin + size].mean(0), dim=0))
    query, texts = torch.stack(vectors[::3]), torch.stack(vectors)
    others = torch.arange(len(texts)) % 3 > 0
    own = torch.arange(len(texts)) == torch.arange(1, len(texts), 3)[:, None]
    scores = (query @ texts.T - 0.1 * own) / 0.5
    return F.cross_entropy(scores[:, others], own[:, others].float().argmax(-1))


def _sizes(task: str, batch: Batch) -> list[int]:
    """Tokens of each labeled text."""
    ends = torch.cat([batch.labels[task][0][1:], torch.tensor([batch.input_ids.numel()])])
    begins, flat = batch.labels[task][0], batch.input_ids.flatten()
    return [int((flat[a:b] > 0).sum()) for a, b in zip(begins, ends, strict=True)]
