"""Backbone and heads together.

Every head runs in every forward, in one fixed order, whatever labels a batch has: a head without
labels reads one row, times 0. Ranks and steps that run different modules break ZeRO.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from palm_ds.backbone import Backbone
from palm_ds.errors import UserError, suggest
from palm_ds.example import Batch
from palm_ds.heads import HeadOutput


class Model(nn.Module):
    """`heads` by name, in their order; `head_of` says which head each task uses."""

    def __init__(
        self, backbone: Backbone, heads: Mapping[str, nn.Module], head_of: Mapping[str, str]
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

    def forward(self, batch: Batch) -> dict[str, HeadOutput]:
        """Loss sum and right guesses of each task, in the order of `head_of`."""
        flat = self.backbone(batch).flatten(0, 1)  # (rows * length, width)
        outputs = {}
        for task, name in self.head_of.items():
            head = self.heads[name]
            if task in batch.labels and len(batch.labels[task][0]):
                at, targets = batch.labels[task]
                outputs[task] = head(self._rows(head, flat.index_select(0, at)), targets)
            else:
                outputs[task] = self._idle(head, flat)
        return outputs

    def logits(self, batch: Batch, task: str) -> torch.Tensor:
        """(n, classes) at the labelled positions of the task."""
        if task not in self.head_of:
            raise UserError(f'no task "{task}"{suggest(task, self.head_of)}')
        head = self.heads[self.head_of[task]]
        at = batch.labels[task][0]
        flat = self.backbone(batch).flatten(0, 1)
        return head.logits(self._rows(head, flat.index_select(0, at)))

    def _rows(self, head: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return self.backbone.pooler(rows) if head.pooled else rows

    def _idle(self, head: nn.Module, flat: torch.Tensor) -> HeadOutput:
        """The head on one row of zeros, so that its logits are finite whatever the backbone gives."""
        row = self._rows(head, flat[:1] * 0)
        output = head(row, torch.zeros(1, dtype=torch.int64, device=flat.device))
        return HeadOutput(output.loss_sum * 0, output.correct * 0)
