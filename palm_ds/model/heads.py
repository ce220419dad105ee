"""Small modules over rows of the encoder's output, each with its loss.

A head gets only the rows that carry a label. `forward` gives the sum of their losses (the engine
divides by the count over the whole step) and how many it got right; `logits` gives the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.activations import ACTIVATIONS
from palm_ds.model.encoder import Encoder, init_weights
from palm_ds.model.kernels import layer_norm, word_loss


class HeadOutput(NamedTuple):
    """Of the labelled rows: the sum of their losses (an fp32 scalar), how many were got right (NaN
    where that is no question)."""

    loss_sum: torch.Tensor
    correct: torch.Tensor


class Head(nn.Module):
    """What the model wants to know of a head. `forward(rows, targets)` gives a HeadOutput,
    `logits(rows)` the scores of rows, (n, any); both get `groups` as well where `grouped`."""

    pooled = False
    """It reads rows that went through the backbone's pooler (whole texts do)."""
    grouped = False
    """Labels of an example are one together: it is given `groups`, (n,) int64 from 0 and ascending,
    which example each row belongs to."""

    def blank(self, device: torch.device) -> torch.Tensor:
        """(1, ...) any target, for a batch without labels."""
        return torch.zeros(1, dtype=torch.int64, device=device)


def class_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    smoothing: float = 0.0,
    weights: Sequence[float] = (),
) -> HeadOutput:
    """Cross-entropy in fp32, summed; `smoothing`: the share of a target spread over all classes;
    `weights`: what each class counts for, if not 1."""
    weight = logits.new_tensor(weights, dtype=torch.float32) if weights else None
    loss = F.cross_entropy(
        logits.float(), targets, weight, reduction="sum", label_smoothing=smoothing
    )
    return HeadOutput(loss, (logits.detach().argmax(-1) == targets).sum())


class ClassHead(Head):
    """One of `classes`, by a linear map."""

    def __init__(
        self,
        hidden_size: int,
        classes: int,
        *,
        pooled: bool = False,
        init_range: float = 0.02,
        dropout: float = 0.0,
        smoothing: float = 0.0,
        weights: Sequence[float] = (),
    ):
        super().__init__()
        self.pooled, self.classes = pooled, classes
        self.dropout, self.smoothing, self.weights = dropout, smoothing, tuple(weights)
        self.out = nn.Linear(hidden_size, classes)
        init_weights(self, init_range)

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        if not self.training:  # held-out losses are of the plain objective
            return class_loss(self.logits(rows), targets)
        return class_loss(self.logits(rows), targets, self.smoothing, self.weights)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        if self.dropout:
            rows = F.dropout(rows, self.dropout, self.training)
        return self.out(rows)  # (n, classes)


class MaskedWordHead(Head):
    """Which word stood here: dense, activation, LayerNorm, then a product with the word table.

    `tied_words` is the backbone's word table itself, registered here too so that ZeRO 3 gathers it
    for this module; a state_dict holds it once, under the backbone's name.
    """

    def __init__(self, backbone: Encoder):
        super().__init__()
        config = backbone.config
        self.activation, self.loss_form = ACTIVATIONS[config.activation], backbone.kernels.word_loss
        self.classes = backbone.word.num_embeddings
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = layer_norm(
            config.hidden_size, config.layer_norm_eps, backbone.kernels.layer_norm
        )
        self.bias = nn.Parameter(torch.zeros(self.classes))
        init_weights(self, config.init_range)
        self.tied_words = backbone.word.weight
        self.register_state_dict_post_hook(_leave_out_words)
        self.register_load_state_dict_post_hook(_do_not_miss_words)

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        rows = self.transform(rows)
        return HeadOutput(*word_loss(rows, self.tied_words, self.bias, targets, self.loss_form))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(self.transform(rows), self.tied_words, self.bias)  # (n, words)

    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.activation(self.dense(rows)))


def _leave_out_words(module: nn.Module, state: dict, prefix: str, _metadata: object) -> None:
    state.pop(prefix + "tied_words", None)


def _do_not_miss_words(_module: nn.Module, keys: object) -> None:
    missing = keys.missing_keys  # type: ignore[attr-defined]
    missing[:] = [name for name in missing if name.rpartition(".")[2] != "tied_words"]
