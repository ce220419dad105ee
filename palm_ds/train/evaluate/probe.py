"""Linear probe: how well a linear classifier reads classes off the vectors of texts, while a run
trains (Alain and Bengio 2017).

    rows ──encoder──> pooled vectors ──some of them──> classifier ──the others──> accuracy

The encoder is only read. The classifier is multinomial logistic regression on standardized vectors,
fitted each time from zeros: no random numbers, no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.data.reader import open_table
from palm_ds.data.sources.source import held_out_draw
from palm_ds.data.sources.table import TableSource, split_rows
from palm_ds.data.stream.packing import micro_batches
from palm_ds.data.stream.task_group_dataset import (
    PackedRow,
    TaskGroupDataset,
    build_examples,
    collate_built,
    held_out_rows,
)
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.pooling import pool
from palm_ds.tasks.classification import Classification
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.train.recipe.sections import ProbeSettings

HELD_OUT = 0.2
"""Share of the rows to test on, where no table is given for it."""
_NAME = "probe"
_STEPS = 1000


class ProbeScore(NamedTuple):
    """Result of a probe on its test rows."""

    sizes: tuple[int, int, int]
    """Classes, rows to fit on, rows to test on."""
    loss: float
    accuracy: float
    baseline_loss: float
    """Of predictions that know only the frequencies of classes in the rows to fit on."""
    baseline_accuracy: float

    @property
    def rows(self) -> int:
        """Rows that the classifier is tested on."""
        return self.sizes[2]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Labeled texts as inputs of an encoder."""

    task: str
    """The task whose row of the task embedding the texts have, which the score is named after."""
    classes: Classification
    sides: tuple[TaskGroupDataset[TableSource], TaskGroupDataset[TableSource]]
    """The rows to fit on and those to test on."""
    length: int
    """Tokens of a packed row."""
    pad: int
    pooling: str = "mean"

    @cached_property
    def _rows(self) -> list[PackedRow]:
        sizes = [len(side.source) for side in self.sides]
        parts = [held_out_rows(side, n, sizes[n]) for n, side in enumerate(self.sides)]
        return [row for part in parts for row in part]

    @cached_property
    def _targets(self) -> list[np.ndarray]:
        """(rows,) the classes of each side."""
        return [self.classes.targets(side.source) for side in self.sides]

    def vectors(
        self, read: Callable[[Batch], torch.Tensor], *, rows: int, rank: int = 0, world: int = 1
    ) -> np.ndarray:
        """(texts, hidden) the vectors of this process's share of the texts, those to fit on first,
        0 of the others: `rows` packed rows in each call of `read` (`vectors_of`), of which all
        processes make equally many."""
        numbers: list[int] = []
        parts: list[np.ndarray] = []
        first = (0, len(self.sides[0].source))
        for part in micro_batches(self._rows, size=rows, rank=rank, world=world):
            built = build_examples(self.sides, part)
            numbers += [
                first[each.ref.dataset] + each.example.item for row in built for each in row
            ]
            batch = collate_built(self.sides, built, self.length, self.pad)
            parts.append(read(batch).float().cpu().numpy())
        features = np.concatenate(parts)
        every = np.zeros((sum(map(len, self._targets)), features.shape[1]), np.float32)
        every[numbers] = features
        return every

    def vectors_of(self, encoder: Encoder, batch: Batch) -> torch.Tensor:
        """(texts of the batch, hidden)"""
        rows = encoder.of_texts(encoder(batch)).flatten(0, 1)
        vectors = pool(rows, batch.sequence_lengths, self.pooling)
        if _NAME not in batch.labels:
            return vectors[:0]
        positions, _ = batch.labels[_NAME]  # of the first token of each text
        return vectors[torch.searchsorted(batch.cu_seqlens[:-1].long(), positions)]

    def score(self, vectors: np.ndarray) -> ProbeScore:
        """The result, given the vectors (texts, hidden) of all texts."""
        fitted, tested = self._targets
        own, others = np.split(vectors.astype(np.float64), [len(fitted)])
        scores = fit_linear(own, fitted, len(self.classes.labels))(others)
        losses = F.cross_entropy(torch.from_numpy(scores), torch.from_numpy(tested))
        right = np.where(np.isnan(scores).any(1), np.nan, scores.argmax(1) == tested)
        base_losses, base_right = self.classes.baseline(tested, self.sides[0].source)
        return ProbeScore(
            sizes=(len(self.classes.labels), len(fitted), len(tested)),
            loss=float(losses),
            accuracy=float(right.mean()),
            baseline_loss=float(base_losses.mean()),
            baseline_accuracy=float(base_right.mean()),
        )


def fit_linear(
    vectors: np.ndarray, targets: np.ndarray, classes: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Logistic regression of targets (n,) on vectors (n, hidden), fp64: a function from vectors to
    scores (any, classes). The vectors are standardized; the penalty is half the squared weights,
    against the summed loss (scikit-learn's C = 1)."""
    center, spread = vectors.mean(0), vectors.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    inputs = torch.from_numpy((vectors - center) / spread)
    wanted = torch.from_numpy(targets)
    weights = torch.zeros(inputs.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias],
        max_iter=_STEPS,
        history_size=20,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        penalty = weights.square().sum() / 2 / len(inputs)
        loss = F.cross_entropy(inputs @ weights + bias, wanted) + penalty
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    weight, shift = weights.detach().numpy(), bias.detach().numpy()
    return lambda given: (given - center) / spread @ weight + shift


def open_probe(
    settings: ProbeSettings,
    tokenizer: Tokenizer,
    *,
    task: str,
    task_id: int,
    length: int,
    segments: int,
) -> Probe:
    """The rows of `evaluate.probe`, texts truncated to `length` tokens. Raises UserError."""
    fitted, tested = _sides(settings, tokenizer)
    classes = Classification(name=_NAME).resolved(fitted)
    for side in (fitted, tested):
        if not len(side):
            raise UserError(f"{side.name}: no rows to {'fit' if side is fitted else 'test'} on")
        classes.check(side, labeled=True)
    datasets = [
        TaskGroupDataset(
            name=_NAME,
            tasks=(classes,),
            task_id=task_id,
            source=side,
            seed=0,
            max_length=length,
            fixed=True,
            segments=segments,
        )
        for side in (fitted, tested)
    ]
    return Probe(
        task=task,
        classes=classes,
        sides=(datasets[0], datasets[1]),
        length=length,
        pad=tokenizer.vocabulary.pad,
        pooling=settings.pooling,
    )


def _sides(settings: ProbeSettings, tokenizer: Tokenizer) -> Sequence[TableSource]:
    """The rows to fit on and those to test on."""
    table = open_table(settings.table, settings.read)
    share = 0.0 if settings.validation else HELD_OUT
    fitted, tested = split_rows(table, share, tokenizer, "table")
    if settings.validation:
        given = open_table(settings.validation, settings.read)
        tested, _ = split_rows(given, 0.0, tokenizer, "validation")
    return [_sampled(side, settings.rows) for side in (fitted, tested)]


def _sampled(side: TableSource, most: int) -> TableSource:
    """At most that many of the rows, always the same."""
    chosen = np.argsort(held_out_draw(side.numbers), kind="stable")[:most]
    return replace(side, numbers=side.numbers[np.sort(chosen)])
