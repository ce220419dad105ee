"""Models, batches and training loops that the sections share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.flops import training_flops
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels, choose_kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.implementation import Environment
from palm_ds.runtime.device.torch_settings import DTYPES
from palm_ds.runtime.optimizer.param_groups import param_groups

SHAPES = {
    "toy": (32, 2, 2),
    "mini": (256, 4, 4),
    "minilm": (384, 6, 12),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "modernbert-toy": (32, 3, 2),
    "modernbert-mini": (256, 4, 4),
    "modernbert-base": (768, 22, 12),
}
"""{name: (hidden size, layers, heads)}"""
MODERN_WORDS = 50_368
WORDS, MASKED, LEARNING_RATE, CLIP = 30_522, 0.15, 1e-4, 1.0
CLS, SEP, FIRST = 2, 3, 5


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One model on one kind of batch."""

    shape: str
    length: int
    rows: int
    precision: str = "bf16"
    dropout: float = 0.1
    requested: tuple[tuple[str, str], ...] = ()
    """Kernels that are asked for; the others are the ones a run would choose."""
    words: int = WORDS

    @property
    def config(self) -> EncoderConfig:
        width, layers, heads = SHAPES[self.shape]
        sizes = {"hidden_size": width, "num_layers": layers, "num_heads": heads}
        own: dict[str, Any]
        if self.modern:
            own = {"kind": "modernbert", "intermediate_size": 3 * width // 2}
        else:
            own = {"max_positions": self.length, "token_types": 2, "task_types": 0}
        own |= {"vocab_size": self.words, "dropout": self.dropout}
        return EncoderConfig.from_dict({**sizes, **own, "attention_dropout": self.dropout})

    @property
    def modern(self) -> bool:
        """Whether it is a ModernBERT, which has windows and rotary positions."""
        return self.shape.startswith("modernbert")

    def environment(self, device: torch.device, dropout: str) -> Environment:
        """What implementations are asked about, with this form of dropout."""
        return Environment(
            device=device,
            dtype=DTYPES[self.precision],
            config=self.config,
            dropout=dropout,
            windows=self.modern,
        )

    def kernels(self, device: torch.device, stage: int = 1) -> Kernels:
        return self.choice(device, stage)[0]

    def choice(self, device: torch.device, stage: int = 1) -> tuple[Kernels, list[str]]:
        """The kernels under this ZeRO stage, and a line for each with the reasons."""
        return choose_kernels(
            dict(self.requested),
            device=device,
            dtype=DTYPES[self.precision],
            config=self.config,
            zero_stage=stage,
            windows=self.modern,
        )

    def model(self, kernels: Kernels, device: torch.device) -> Model:
        """Masked words and a class of each sequence, as pretraining has them."""
        torch.manual_seed(1)
        backbone = build_encoder(self.config, kernels)
        heads = {"words": MaskedLMHead(backbone), "order": ClassHead(self.hidden, 9, pooled=True)}
        return Model(backbone, heads, {name: name for name in heads}).to(device)

    @property
    def hidden(self) -> int:
        return SHAPES[self.shape][0]

    def batches(self, number: int, seed: int = 0) -> list[Batch]:
        return [make_batch(self, np.random.default_rng((seed, n))) for n in range(number)]

    def flops(self, batch: Batch) -> float:
        return float(training_flops(self.config, batch, ["words"]))

    def changed(self, **values: Any) -> Setup:
        return replace(self, **values)


def make_batch(setup: Setup, rng: np.random.Generator) -> Batch:
    """Full rows of sequences of varied length, from an eighth of the row to all of it. A token
    follows from the one before it three times out of four, so that there is something to learn."""
    rows = []
    for _ in range(setup.rows):
        row, room = [], setup.length
        while room:
            drawn = int(rng.integers(max(setup.length // 8, 4), setup.length + 1))
            size = room if room - drawn < 4 else drawn
            row.append((_example(setup, size, rng), 0))
            room -= size
        rows.append(row)
    return collate(rows, length=setup.length, pad=0)


def _example(setup: Setup, size: int, rng: np.random.Generator) -> Example:
    ids = _tokens(setup.words, size, rng)
    example = Example(
        input_ids=ids,
        token_type_ids=np.zeros(size, np.int64),
        source_offsets=np.arange(size),
        annotations={},
    )
    at = np.sort(rng.choice(np.arange(1, size - 1), max(int(MASKED * size), 1), replace=False))
    example.labels["words"] = (at, ids[at].copy())
    example.labels["order"] = (np.zeros(1, np.int64), np.array([ids[1] % 9]))
    example.input_ids[at] = 4
    return example


def _tokens(words: int, size: int, rng: np.random.Generator) -> np.ndarray:
    used = min(words, 2000) - FIRST  # few enough to be learned in 50 steps
    follows = rng.random(size) < 0.75
    drawn = (rng.zipf(1.3, size) - 1) % used
    for n in range(1, size):
        if follows[n]:
            drawn[n] = (7 * drawn[n - 1] + 1) % used
    ids = (drawn + FIRST).astype(np.int64)
    ids[0], ids[-1] = CLS, SEP
    return ids


class BareLoop:
    """palm_ds's model in a plain torch loop, its batches on the device already: weights in the
    precision, fp32 copies of them under fused AdamW, clipping."""

    def __init__(self, setup: Setup, batches: Sequence[Batch], device: torch.device):
        self.setup, self.kernels = setup, setup.kernels(device)
        self.model = setup.model(self.kernels, device).to(DTYPES[setup.precision]).train()
        self.batches = [batch.to(device) for batch in batches]
        self.counts = [[batch.count(task) for task in self.model.head_of] for batch in batches]
        self.weights: list[torch.Tensor] = list(self.model.parameters())
        half = setup.precision != "fp32"
        groups = param_groups(self.model, weight_decay=0.01)
        self.masters = self.weights
        if half:
            copies = {id(p): p.detach().float() for p in self.weights}
            self.masters = [copies[id(p)] for p in self.weights]
            for group in groups:
                group["params"] = [copies[id(p)] for p in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def step(self, number: int) -> torch.Tensor:
        which = number % len(self.batches)
        outputs = self.model(replace(self.batches[which], dropout_key=number))
        sums = [output.loss_sum for output in outputs.values()]
        pairs = zip(sums, self.counts[which], strict=True)
        loss = torch.stack([value / max(count, 1) for value, count in pairs]).sum()
        loss.backward()
        self.update()
        return loss.detach()

    def update(self) -> None:
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters is not self.weights:
            with torch.no_grad():
                copy_all: Any = getattr(torch, "_foreach_copy_")  # noqa: B009  as torch.optim does
                copy_all(self.weights, self.masters)

    def close(self) -> None:
        del self.model, self.optimizer, self.weights, self.masters, self.batches


class EngineLoop:
    """palm_ds as a run trains it: DeepSpeed's engine, batches from worker processes."""

    def __init__(
        self,
        setup: Setup,
        batches: Sequence[Batch],
        device: torch.device,
        *,
        stage: int = 1,
        workers: int = 2,
        optimizer: Mapping[str, Any] | None = None,
        seed: int = 1,
    ):
        from palm_ds.engine import Engine
        from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
        from palm_ds.train.loop.prefetch import prefetched

        self.setup, self.kernels = setup, setup.kernels(device, stage)
        settings = {"lr": LEARNING_RATE, "clip": CLIP, **(optimizer or {})}
        self.lr = settings["lr"]
        self.engine = Engine(
            setup.model(self.kernels, device),
            ds_config=ds_config(setup, stage),
            optimizer=OptimizerConfig(**settings),
            rows=setup.rows,
            seed=seed,
        )
        self.batches, self.waited = list(batches), 0.0
        stream: Any = _Cycle(self.batches)
        workers = workers if device.type == "cuda" else 0
        self.feed = iter(prefetched(stream, self.engine, range(1_000_000), workers))

    def step(self, number: int) -> torch.Tensor:
        began = time.perf_counter()
        batches = next(self.feed)
        self.waited += time.perf_counter() - began
        result = self.engine.step(batches, self.lr, number)
        losses = [result.loss_sums[t] / max(result.counts[t], 1) for t in result.counts]
        return torch.stack(losses).sum().detach()

    def close(self) -> None:
        del self.feed
        self.engine.release()


def ds_config(setup: Setup, stage: int) -> Any:
    from palm_ds.runtime.deepspeed.ds_config import make_ds_config

    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.rows,
        "zero_optimization": {"stage": stage},
        "palm_ds": {"kernels": dict(setup.requested)},
    }
    if setup.precision != "fp32":
        values[setup.precision] = {"enabled": True}
    if setup.precision == "fp16":
        values["fp16"]["initial_scale_power"] = 12  # few skipped steps at the start
    return make_ds_config(values)


@dataclass
class _Cycle:
    """A stream that repeats some batches."""

    made: list[Batch]

    @property
    def longest(self) -> int:
        return self.made[0].input_ids.shape[1]

    def length_at(self, step: int) -> int:
        return self.longest

    def rows_at(self, step: int) -> int:
        return len(self.made[0].input_ids)

    def batches(self, step: int, rank: int, world: int, micro_rows: int) -> list[Batch]:
        return [self.made[step % len(self.made)]]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.made)
