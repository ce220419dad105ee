"""Heads of whole texts: each reads the pooled row of a text.

MultiLabelHead   any number of classes: a sigmoid each
RegressionHead   a number: squared error
PairHead         a better and a worse text: hinge on their difference
ChoiceHead       one of an example's texts: softmax over them
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.encoder.encoder import init_weights
from palm_ds.model.heads.heads import Head, HeadOutput


def best_of_groups(scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(n,) bool: the row with the highest of the scores (n,) of its group, the first of equal ones;
    `groups` (n,) int64."""
    n = len(scores)
    row = torch.arange(n, device=scores.device)
    best = torch.full_like(scores, -math.inf).scatter_reduce(0, groups, scores, "amax")[groups]
    candidates = torch.where(scores == best, row, n)
    return row == torch.full_like(row, n).scatter_reduce(0, groups, candidates, "amin")[groups]


class PooledHead(Head):
    """Base of heads that read whole texts: a linear map of the pooled row."""

    pooled = True

    def __init__(
        self,
        hidden_size: int,
        outputs: int = 1,
        *,
        dropout: float = 0.0,
        init_range: float = 0.02,
        images: bool = False,
        means: bool = False,
    ):
        """`images`, `means`: of texts with their images, or of the means of their tokens."""
        super().__init__()
        self.reads(images=images, means=means)
        self.input_dropout = dropout
        self.out = nn.Linear(hidden_size, outputs)
        init_weights(self, init_range, truncated=False)

    def logits(self, rows: torch.Tensor, groups: torch.Tensor | None = None) -> torch.Tensor:
        """Scores (n, outputs) of rows (n, hidden)."""
        return self.out(rows)


class MultiLabelHead(PooledHead):
    """Any number of `outputs` classes. A text's loss is the mean over its classes (as in
    `BertForSequenceClassification`), or their sum; a text is correct if all its classes are."""

    soft = "labels"

    def __init__(
        self,
        hidden_size: int,
        outputs: int,
        *,
        hidden_layer: int = 0,
        summed: bool = False,
        threshold: float = 0.5,
        dropout: float = 0.0,
        init_range: float = 0.02,
        images: bool = False,
        means: bool = False,
    ):
        """`hidden_layer`: the width of a layer with ReLU before the last one; both are initialized
        as in ERNIE-ViL's head of questions. 0: none."""
        super().__init__(
            hidden_layer or hidden_size,
            outputs,
            dropout=dropout,
            init_range=init_range,
            images=images,
            means=means,
        )
        self.summed = summed
        self.hidden = nn.Linear(hidden_size, hidden_layer) if hidden_layer else None
        for layer in (self.hidden, self.out) if self.hidden else ():
            nn.init.xavier_uniform_(layer.weight, gain=0.5**0.5)
            nn.init.zeros_(layer.bias)
        self.limit = math.log(threshold / (1 - threshold))  # the threshold before the sigmoid

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n, outputs) float, 0 or 1."""
        scores = self.logits(rows).float()
        loss = F.binary_cross_entropy_with_logits(scores, targets.float(), reduction="none")
        right = ((scores.detach() >= self.limit) == (targets > 0.5)).all(-1)
        return HeadOutput((loss.sum(-1) if self.summed else loss.mean(-1)).sum(), right.sum())

    def hidden_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.hidden is None else F.relu(self.hidden(rows))  # (n, hidden_layer)

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, self.out.out_features, device=device)


class RegressionHead(PooledHead):
    """Predicts a number; `correct` is NaN."""

    soft = "number"

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n,) float."""
        scores = self.logits(rows)[:, 0].float()
        loss = F.mse_loss(scores, targets.float(), reduction="sum")
        return HeadOutput(loss, torch.full_like(loss.detach(), math.nan))

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, device=device)


class PairHead(PooledHead):
    """Head for how well two texts match: the sigmoid of a score. Of the two rows of an example, the
    one with target 1 should score higher than the one with target 0 by `margin` (PaddlePALM's
    Match, trained pairwise). An example with one row has no loss."""

    grouped = True
    soft = "labels"

    def __init__(
        self,
        hidden_size: int,
        *,
        margin: float = 0.5,
        dropout: float = 0.0,
        init_range: float = 0.02,
    ):
        super().__init__(hidden_size, dropout=dropout, init_range=init_range)
        self.margin = margin

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        """`targets` and `groups` (n,) int64. Tensors over groups have n entries as well: reading
        the number of groups would synchronize with the device."""
        probabilities = torch.sigmoid(self.logits(rows)[:, 0].float())
        zeros = torch.zeros_like(probabilities)
        lead = zeros.index_add(0, groups, probabilities * (2 * targets - 1))
        pairs = zeros.index_add(0, groups, torch.ones_like(probabilities)) == 2
        loss = (F.relu(self.margin - lead) * pairs).sum()
        return HeadOutput(loss, ((lead.detach() > 0) & pairs).sum())


class ChoiceHead(PooledHead):
    """Head for choosing the text with target 1 among an example's texts: one score each, and a
    softmax over those of the example, whatever their number (as in `BertForMultipleChoice`)."""

    grouped = True
    soft = "groups"

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        """`targets` and `groups` (n,) int64; each group has one target of 1. Tensors over groups
        have n entries, as in PairHead; those beyond the last group are unused."""
        scores = self.logits(rows)[:, 0].float()
        best = torch.full_like(scores, -math.inf).scatter_reduce(
            0, groups, scores.detach(), "amax"
        )[groups]
        total = torch.zeros_like(scores).index_add(0, groups, (scores - best).exp())[groups]
        loss = ((best + total.log() - scores) * targets).sum()
        return HeadOutput(loss, (targets * best_of_groups(scores.detach(), groups)).sum())
