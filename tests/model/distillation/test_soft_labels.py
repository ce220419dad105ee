"""Soft labels of every kind of head: their gradient, and batches in which a task has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.distillation.settings import LogitsSettings
from palm_ds.model.distillation.soft_labels import scores_of, soft_loss, word_scores
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import (
    ClassHead,
    MaskedLMHead,
)
from palm_ds.model.heads.pooled import ChoiceHead, MultiLabelHead, PairHead, RegressionHead

HIDDEN = 8
ENCODER = build_encoder(
    EncoderConfig(vocab_size=20, hidden_size=HIDDEN, num_layers=1, num_heads=2, max_positions=8)
)
HEADS: list[Any] = [
    ClassHead(HIDDEN, 3),
    MultiLabelHead(HIDDEN, 3),
    RegressionHead(HIDDEN),
    ChoiceHead(HIDDEN),
    PairHead(HIDDEN),
    CRFHead(HIDDEN, 3),
    MaskedLMHead(ENCODER),
]


@pytest.mark.parametrize("measure", ["kl", "mse"])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_no_labels_have_a_finite_loss_and_gradient(head: nn.Module, measure: Any) -> None:
    """It is multiplied by 0, which does not make infinity disappear."""
    rows = torch.zeros(1, HIDDEN, requires_grad=True)
    groups = (torch.zeros(1, dtype=torch.int64),) if getattr(head, "grouped", False) else ()
    settings = LogitsSettings(loss=measure, temperature=2.0)
    loss = soft_loss(head, rows, groups, None, settings).loss_sum * 0
    used = [rows, *(x for x in head.parameters() if x is not ENCODER.word.weight)]
    grads = torch.autograd.grad(loss, used, allow_unused=True)
    assert loss == 0 and all(grad is None or (grad == 0).all() for grad in grads)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_every_head_learns_what_its_teacher_says(head: nn.Module) -> None:
    """The gradient is that of finite differences."""
    torch.manual_seed(4)
    rows = torch.randn(4, HIDDEN, requires_grad=True)
    groups = (torch.tensor([0, 0, 1, 1]),) if getattr(head, "grouped", False) else ()
    teacher: Any = None
    if isinstance(head, MaskedLMHead):
        teacher = word_scores(head, torch.randn(4, HIDDEN))
    else:
        teacher = scores_of(head, torch.randn(4, HIDDEN), groups).detach()
    settings = LogitsSettings(temperature=2.0)

    def loss(at: torch.Tensor) -> torch.Tensor:
        return soft_loss(head, at, groups, teacher, settings).loss_sum

    (grad,) = torch.autograd.grad(loss(rows), rows)
    step = torch.randn_like(rows) * 1e-2
    with torch.no_grad():
        rise = loss(rows + step) - loss(rows - step)
    torch.testing.assert_close((grad * step).sum() * 2, rise, rtol=0.02, atol=1e-5)
    assert grad.abs().max() > 0
