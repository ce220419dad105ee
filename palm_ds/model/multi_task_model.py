"""Encoder and heads together.

Every head runs in every forward, in one fixed order, whatever labels a batch has: a head without
labels reads one row, times 0. Ranks and steps that run different modules break ZeRO.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.model.batch import Batch
from palm_ds.model.encoder import Encoder
from palm_ds.model.heads import Head

_FEW = 0.5  # of a batch's positions: copying more than that costs what it saves


class TaskOutput(NamedTuple):
    """Of a task's labels in a batch: what its head says, and their scores (labels, any) where they
    were asked for."""

    loss_sum: torch.Tensor
    correct: torch.Tensor
    scores: torch.Tensor | None = None


class _TaskLabels(NamedTuple):
    """Of a task in a batch."""

    positions: torch.Tensor  # (n,), flat
    targets: torch.Tensor  # (n, ...)
    groups: tuple[torch.Tensor, ...]  # the head's third argument, where it wants one
    real: int  # 1, or 0 for a stand-in


class Model(nn.Module):
    """`heads` by name, in their order; `head_of` says which head each task uses."""

    def __init__(
        self, backbone: Encoder, heads: Mapping[str, nn.Module], head_of: Mapping[str, str]
    ):
        super().__init__()
        for task, head in head_of.items():
            if head not in heads:
                raise UserError(f'task "{task}": no head "{head}"{suggest(head, heads)}')
        for head in heads:
            if head not in head_of.values():
                raise UserError(f'head "{head}": no task uses it')
        self.backbone = backbone  # first: the word table goes by the backbone's name
        self.heads = nn.ModuleDict(heads)
        self.head_of = dict(head_of)
        self.pooled = any(self._head(task).pooled for task in head_of)

    def forward(self, batch: Batch, scores: Collection[str] = ()) -> dict[str, TaskOutput]:
        """Loss sum and right guesses of each task, in the order of `head_of`; of those named in
        `scores` that have labels in the batch, their scores as well."""
        labels = [self._labels(batch, task) for task in self.head_of]
        read = self._encode(batch, torch.cat([each.positions for each in labels]))
        pieces = read.split([len(each.positions) for each in labels])
        outputs = {}
        for task, rows, each in zip(self.head_of, pieces, labels, strict=True):
            # A head without labels gets zeros: its scores are finite whatever the encoder gives,
            # and finite times 0 is 0.
            head, rows = self._head(task), self._read(task, rows * each.real)
            loss, correct = head(rows, each.targets, *each.groups)
            # asked of every process, labels or not: ZeRO 3 gathers weights together
            found = head.logits(rows, *each.groups) if task in scores else None
            found = found if each.real else None
            outputs[task] = TaskOutput(loss * each.real, correct * each.real, found)
        if not self.pooled:
            self._touch_pooler(read, outputs)
        return outputs

    def logits(self, batch: Batch, task: str) -> torch.Tensor:
        """(n, any): the scores at the task's positions in `batch.labels`."""
        if task not in self.head_of:
            raise UserError(f'no task "{task}"{suggest(task, self.head_of)}')
        return self.scores(batch, [task])[task]

    def scores(self, batch: Batch, tasks: Collection[str]) -> dict[str, torch.Tensor]:
        """The same of several tasks; of those that have positions in the batch. Nothing is computed
        that they do not need."""
        labels = {task: self._labels(batch, task) for task in tasks if task in batch.labels}
        if not labels:
            return {}
        asked = torch.cat([each.positions for each in labels.values()])
        at, which = asked.unique(return_inverse=True)
        rows = self.backbone(batch, at).index_select(0, which)  # (positions of all tasks, hidden)
        pieces = rows.split([len(each.positions) for each in labels.values()])
        return {
            task: self._head(task).logits(self._read(task, piece), *each.groups)
            for (task, each), piece in zip(labels.items(), pieces, strict=True)
        }

    def _labels(self, batch: Batch, task: str) -> _TaskLabels:
        """Those of a task; without any: one position and any target, that are not real."""
        grouped = getattr(self._head(task), "grouped", False)
        if task in batch.labels and len(batch.labels[task][0]):
            positions, targets = batch.labels[task]
            return _TaskLabels(positions, targets, (batch.groups[task],) if grouped else (), 1)
        device = batch.ids.device
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        head = self._head(task)
        blank = head.blank(device) if isinstance(head, Head) else nothing
        return _TaskLabels(nothing, blank, (nothing,) if grouped else (), 0)

    def _encode(self, batch: Batch, at: torch.Tensor) -> torch.Tensor:
        """(n, hidden) of the flat positions `at` (n,), which may repeat. The last layer is computed
        for those alone where they are few; to know how many differ would be to wait for the
        device."""
        if len(at) < _FEW * batch.ids.numel():
            return self.backbone(batch, at)
        return self.backbone(batch).flatten(0, 1).index_select(0, at)

    def _head(self, task: str) -> Any:
        return self.heads[self.head_of[task]]

    def _read(self, task: str, rows: torch.Tensor) -> torch.Tensor:
        return self.backbone.pooler(rows) if self._head(task).pooled else rows

    def _touch_pooler(self, read: torch.Tensor, outputs: dict[str, TaskOutput]) -> None:
        """A pooler that no head reads takes part all the same, so that it is one and the same
        thing under every ZeRO stage: a parameter whose gradient is 0."""
        first = next(iter(outputs))
        nothing = self.backbone.pooler(read[:1] * 0).sum() * 0
        outputs[first] = outputs[first]._replace(loss_sum=outputs[first].loss_sum + nothing)
