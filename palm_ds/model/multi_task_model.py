"""The encoder with the heads of all tasks.

Every head runs in every forward pass, in a fixed order, whatever labels the batch has: a head
without labels reads one row of zeros, and its loss is multiplied by 0. ZeRO breaks if ranks or
steps run different modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.rng import derive_key
from palm_ds.model.batch import Batch
from palm_ds.model.dropout import dropout, dropout_keys
from palm_ds.model.encoder import Encoder
from palm_ds.model.heads import Head

_FEW = 0.5  # share of a batch's positions above which gathering costs more than it saves


class TaskOutput(NamedTuple):
    """A task's summed loss and number of correct predictions in a batch, and its scores
    (labels, any) if they were requested. If its head's loss is over whole steps: a loss of 0, and
    always the vectors (labels, hidden) that it is computed from, as `scores`."""

    loss_sum: torch.Tensor
    correct: torch.Tensor
    scores: torch.Tensor | None = None


class _TaskLabels(NamedTuple):
    """The labels of a task in a batch."""

    positions: torch.Tensor  # (n,), flat
    targets: torch.Tensor  # (n, ...)
    groups: tuple[torch.Tensor, ...]  # the third argument of a grouped head
    real: int  # 1; 0 for the dummy label of a batch without labels


class Model(nn.Module):
    """`heads` by name, in their order; `head_of` maps each task to the name of its head."""

    def __init__(
        self, backbone: Encoder, heads: Mapping[str, nn.Module], head_of: Mapping[str, str]
    ):
        super().__init__()
        for task, head in head_of.items():
            if head not in heads:
                raise UserError(f'task "{task}": no head "{head}"{suggest(head, heads)}')
        for head in heads:
            if head not in head_of.values():
                raise UserError(f'head "{head}": no task uses it; remove it, or give it a task')
        self.backbone = backbone  # first, so that the tied embeddings have the backbone's name
        self.heads = nn.ModuleDict(heads)
        self.head_of = dict(head_of)
        self.pooled = any(self._head(task).pooled for task in head_of)
        self._sites = {task: derive_key("head", task) >> 1 for task in head_of}

    def forward(self, batch: Batch, scores: Collection[str] = ()) -> dict[str, TaskOutput]:
        """Summed loss and correct predictions of each task, in the order of `head_of`; also the
        scores of those tasks in `scores` that have labels in the batch."""
        labels = [self._labels(batch, task) for task in self.head_of]
        pieces = self._read(batch, self.head_of, labels)
        outputs = {}
        for task, rows, each in zip(self.head_of, pieces, labels, strict=True):
            # A head without labels reads zeros: its scores are finite whatever the encoder returns,
            # and finite times 0 is 0.
            head, rows = self._head(task), self._pool(task, rows * each.real)
            rows = self._dropout(task, rows, batch, each.positions)
            if getattr(head, "whole_step", False):
                outputs[task] = _vectors(rows, each)
                continue
            loss, correct = head(rows, each.targets, *each.groups)
            # Every process computes scores, with labels or without: ZeRO 3 gathers weights jointly.
            found = head.logits(rows, *each.groups) if task in scores else None
            found = found if each.real else None
            outputs[task] = TaskOutput(loss * each.real, correct * each.real, found)
        if not self.pooled:
            self._touch_pooler(pieces[0], outputs)
        return outputs

    def logits(self, batch: Batch, task: str) -> torch.Tensor:
        """Scores (n, any) at the task's positions in `batch.labels`."""
        if task not in self.head_of:
            raise UserError(f'no task "{task}"{suggest(task, self.head_of)}')
        return self.scores(batch, [task])[task]

    def scores(self, batch: Batch, tasks: Collection[str]) -> dict[str, torch.Tensor]:
        """Scores of several tasks, of those that have positions in the batch. Computes only what
        these tasks need."""
        labels = {task: self._labels(batch, task) for task in tasks if task in batch.labels}
        if not labels:
            return {}
        pieces = self._read(batch, labels, list(labels.values()), unique=True)
        return {
            task: self._head(task).logits(self._pool(task, piece), *each.groups)
            for (task, each), piece in zip(labels.items(), pieces, strict=True)
        }

    def _labels(self, batch: Batch, task: str) -> _TaskLabels:
        """The task's labels; if there are none, a dummy one at position 0."""
        grouped = getattr(self._head(task), "grouped", False)
        if task in batch.labels and len(batch.labels[task][0]):
            positions, targets = batch.labels[task]
            return _TaskLabels(positions, targets, (batch.groups[task],) if grouped else (), 1)
        device = batch.input_ids.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        head = self._head(task)
        target = head.dummy_target(device) if isinstance(head, Head) else zero
        return _TaskLabels(zero, target, (zero,) if grouped else (), 0)

    def _read(
        self,
        batch: Batch,
        tasks: Iterable[str],
        labels: Sequence[_TaskLabels],
        unique: bool = False,
    ) -> list[torch.Tensor]:
        """Per task the rows (its labels, hidden) that its head reads, before pooling.

        `unique`: remove repeated positions, which synchronises with the device."""
        averaged = [
            getattr(self._head(task), "averaged", False) and each.real
            for task, each in zip(tasks, labels, strict=True)
        ]
        if any(averaged):
            encoded = self.backbone(batch)
            means, flat = batch.sequence_means(encoded), encoded.flatten(0, 1)
            return [
                means.index_select(0, batch.sequence_of(each.positions))
                if mean
                else flat.index_select(0, each.positions)
                for mean, each in zip(averaged, labels, strict=True)
            ]
        at = torch.cat([each.positions for each in labels])
        if unique:
            at, index = at.unique(return_inverse=True)
            rows = self.backbone(batch, at).index_select(0, index)
        else:
            rows = self._encode(batch, at)
        return list(rows.split([len(each.positions) for each in labels]))

    def _encode(self, batch: Batch, at: torch.Tensor) -> torch.Tensor:
        """The vectors (n, hidden) at the flat positions `at` (n,), which may repeat. If these are
        few, the last layer is computed for them only. Repeats are not removed, since counting the
        distinct positions would synchronise with the device."""
        if len(at) < _FEW * batch.input_ids.numel():
            return self.backbone(batch, at)
        return self.backbone(batch).flatten(0, 1).index_select(0, at)

    def _head(self, task: str) -> Any:
        return self.heads[self.head_of[task]]

    def _pool(self, task: str, rows: torch.Tensor) -> torch.Tensor:
        """What the task's head reads."""
        return self.backbone.pooler(rows) if self._head(task).pooled else rows

    def _dropout(
        self, task: str, rows: torch.Tensor, batch: Batch, positions: torch.Tensor
    ) -> torch.Tensor:
        """The dropout of the rows (n, hidden) that a task's head reads, at these flat positions."""
        rate = getattr(self._head(task), "input_dropout", 0.0) if self.training else 0.0
        if not rate or self.backbone.kernels.dropout != "counter":
            return dropout(rows, rate, None)
        keys = dropout_keys(batch, rows.shape[1]).site(self._sites[task])
        return dropout(rows, rate, keys.select(positions))

    def _touch_pooler(self, encoded: torch.Tensor, outputs: dict[str, TaskOutput]) -> None:
        """Gives a pooler that no head uses a gradient of 0, so that it is treated alike under every
        ZeRO stage."""
        first = next(iter(outputs))
        dtype = next(self.backbone.pooler.parameters()).dtype  # means are fp32
        zero = self.backbone.pooler(encoded[:1].to(dtype) * 0).sum() * 0
        outputs[first] = outputs[first]._replace(loss_sum=outputs[first].loss_sum + zero)


def _vectors(rows: torch.Tensor, labels: _TaskLabels) -> TaskOutput:
    """The output of a head whose loss is over whole steps. Its loss of 0 has a gradient of 0, so
    that a batch without labels takes part in the backward pass."""
    vectors = rows.float()
    zero = vectors.sum() * 0
    return TaskOutput(zero, zero.detach(), vectors if labels.real else vectors[:0])
