"""Heads that read whole texts through the pooler, and what their scores mean.

MultiLabelHead   several classes at once: a sigmoid each
RegressionHead       a number: squared error
PairHead         a better and a worse text: hinge on the difference of sigmoids
ChoiceHead       one of an example's texts: softmax over them
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.encoder import init_weights
from palm_ds.model.heads import Head, HeadOutput


class TextHead(Head):
    """What they share: dropout, then a linear map of the pooled row."""

    pooled = True

    def __init__(
        self, hidden_size: int, outputs: int = 1, *, dropout: float = 0.0, init_range: float = 0.02
    ):
        super().__init__()
        self.dropout = dropout
        self.out = nn.Linear(hidden_size, outputs)
        init_weights(self, init_range)

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, outputs) of rows (n, hidden)."""
        return self.out(F.dropout(rows, self.dropout, self.training))


class MultiLabelHead(TextHead):
    """Which of `outputs` classes, any number of them. A text's loss is the mean of its classes'
    (as in `BertForSequenceClassification`); it is right when all of them are."""

    def __init__(
        self, hidden_size: int, outputs: int, *, threshold: float = 0.5, dropout: float = 0.0
    ):
        super().__init__(hidden_size, outputs, dropout=dropout)
        self.limit = math.log(threshold / (1 - threshold))  # of a score before the sigmoid

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n, outputs) float, 0 or 1."""
        scores = self.scores(rows).float()
        loss = F.binary_cross_entropy_with_logits(scores, targets.float(), reduction="none")
        right = ((scores.detach() >= self.limit) == (targets > 0.5)).all(-1)
        return HeadOutput(loss.mean(-1).sum(), right.sum())

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scores(rows)

    def blank(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, self.out.out_features, device=device)


class RegressionHead(TextHead):
    """A number. Right or wrong is no question."""

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n,) float."""
        scores = self.scores(rows)[:, 0].float()
        loss = F.mse_loss(scores, targets.float(), reduction="sum")
        return HeadOutput(loss, torch.full_like(loss.detach(), math.nan))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scores(rows)

    def blank(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, device=device)


class PairHead(TextHead):
    """How well texts match, by the sigmoid of a score; of the two of an example, the one with
    target 1 should lead the one with target 0 by `margin` (PaddlePALM's Match, learned
    pairwise). An example of one text has no loss."""

    grouped = True

    def __init__(self, width: int, *, margin: float = 0.5, dropout: float = 0.0):
        super().__init__(width, dropout=dropout)
        self.margin = margin

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        """`targets` and `groups` (n,) int64. Everything has one entry a row, whatever the number of
        groups: to know it would be to wait for the device."""
        shares = torch.sigmoid(self.scores(rows)[:, 0].float())
        lead = torch.zeros_like(shares).index_add(0, groups, shares * (2 * targets - 1))
        pairs = torch.zeros_like(shares).index_add(0, groups, torch.ones_like(shares)) == 2
        loss = (F.relu(self.margin - lead) * pairs).sum()
        return HeadOutput(loss, ((lead.detach() > 0) & pairs).sum())

    def logits(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return self.scores(rows)


class ChoiceHead(TextHead):
    """Which of an example's texts is the one with target 1: a score each, and a softmax over those
    of the example, however many (as in `BertForMultipleChoice`)."""

    grouped = True

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        """`targets` and `groups` (n,) int64; of each group one target is 1. As in PairHead there is
        an entry a row, and those beyond the number of groups are left alone."""
        scores = self.scores(rows)[:, 0].float()
        many = len(scores)
        best = torch.full_like(scores, -math.inf).scatter_reduce(
            0, groups, scores.detach(), "amax"
        )[groups]
        total = torch.zeros_like(scores).index_add(0, groups, (scores - best).exp())[groups]
        loss = ((best + total.log() - scores) * targets).sum()
        place = torch.arange(many, device=scores.device)
        leading = torch.where(scores.detach() == best, place, many)
        first = torch.full_like(place, many).scatter_reduce(0, groups, leading, "amin")[groups]
        return HeadOutput(loss, (targets * (place == first)).sum())

    def logits(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return self.scores(rows)


def softmax(logits: np.ndarray) -> np.ndarray:
    """(n,) shares of 1 of scores (n,), as float64."""
    shares = np.exp(logits.astype(np.float64) - logits.max())
    return shares / shares.sum()


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """(n,) of scores (n,), as float64; no score is too large."""
    return 0.5 * (1 + np.tanh(0.5 * logits.astype(np.float64)))


def rounded(values: np.ndarray) -> list[float]:
    """Numbers as a file of predictions has them."""
    return [round(float(value), 6) for value in values]
