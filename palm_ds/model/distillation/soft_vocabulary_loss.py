"""Distillation of masked words: soft targets over the vocabulary, a chunk of rows at a time.

    student   rows @ embeddings.T + bias  ──softmax──┐
    teacher   the same, of its own; or its top k     ┴──> loss, and the student's gradient

The gradient is computed in the forward pass, like that of `chunked` in masked_lm_loss.py, so that
neither the student's nor the teacher's scores (n, vocabulary) ever exist for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.distillation.losses import SoftMeasure, hard_scores
from palm_ds.model.inputs.teacher_outputs import VocabularyScores
from palm_ds.model.ops.masked_lm_loss import FP16_SCALE, add_gradients, chunk_size, zero_gradients


@dataclass(frozen=True)
class TokenProjection:
    """The scores rows @ embeddings.T + bias."""

    rows: torch.Tensor  # (n, hidden)
    embeddings: torch.Tensor  # (vocabulary, hidden)
    bias: torch.Tensor  # (vocabulary,)

    def __len__(self) -> int:
        return len(self.rows)

    def scores(self, inside: slice, size: int) -> torch.Tensor:
        found = F.linear(self.rows[inside], self.embeddings, self.bias).float()[:, :size]
        return F.pad(found, (0, size - found.shape[1]), value=-torch.inf)


@dataclass(frozen=True)
class MeanScores:
    """The weighted mean of several teachers' scores; the weights add up to 1."""

    parts: Sequence[tuple[float, VocabularyScores]]

    def __len__(self) -> int:
        return len(self.parts[0][1])

    def scores(self, inside: slice, size: int) -> torch.Tensor:
        each = (scores.scores(inside, size) * weight for weight, scores in self.parts)
        return torch.stack(list(each)).sum(0)


@dataclass(frozen=True)
class TopScores:
    """The k best tokens of each row; all others have probability 0."""

    ids: torch.Tensor  # (n, k) int64
    values: torch.Tensor  # (n, k) fp32, scores or log-probabilities

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> TopScores:
        return TopScores(self.ids.to(device), self.values.to(device))

    def scores(self, inside: slice, size: int) -> torch.Tensor:
        ids = self.ids[inside]
        empty = self.values.new_full((len(ids), size), -torch.inf)
        return empty.scatter_(1, ids, self.values[inside])


def top_scores(teacher: VocabularyScores, k: int, size: int, device: torch.device) -> TopScores:
    """The k best tokens of each row, with their log-probabilities over the whole vocabulary."""
    chunk = chunk_size(device, torch.float32)
    ids, values = [], []
    for first in range(0, max(len(teacher), 1), chunk):
        found = teacher.scores(slice(first, first + chunk), size).log_softmax(-1).topk(k)
        ids.append(found.indices)
        values.append(found.values)
    return TopScores(torch.cat(ids), torch.cat(values))


def soft_vocabulary_loss(
    rows: torch.Tensor,
    embeddings: torch.Tensor,
    bias: torch.Tensor,
    teacher: VocabularyScores,
    *,
    measure: SoftMeasure = "kl",
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss (fp32) of the scores rows @ embeddings.T + bias against the teacher's, as in
    `soft_label_loss`, and the number of rows for which the two agree on the best token.

    rows (n, hidden), embeddings (vocabulary, hidden), bias (vocabulary,)."""
    settings = _SoftTarget(teacher, measure, temperature)
    return _SoftLoss.apply(rows, embeddings, bias, settings)


@dataclass(frozen=True)
class _SoftTarget:
    teacher: VocabularyScores
    measure: SoftMeasure
    temperature: float


class _SoftLoss(torch.autograd.Function):
    """As `masked_lm_loss._ChunkedLoss`, with the teacher's distributions as targets."""

    @staticmethod
    def forward(ctx: Any, rows, embeddings, bias, settings: _SoftTarget):
        needs_grad = any(ctx.needs_input_grad[:3])
        scale = FP16_SCALE / settings.temperature if rows.dtype == torch.float16 else 1.0
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        agree = torch.zeros((), dtype=torch.int64, device=rows.device)
        grads = zero_gradients(rows, embeddings, bias) if needs_grad else []
        chunk = chunk_size(rows.device, rows.dtype)
        for first in range(0, len(rows), chunk):
            inside = slice(first, first + chunk)
            logits = torch.addmm(bias, rows[inside], embeddings.t()).float()
            wanted = settings.teacher.scores(inside, logits.shape[1])
            agree += (logits.argmax(-1) == wanted.argmax(-1)).sum()
            if settings.measure == "hard":
                wanted = hard_scores("classes", wanted)
            found, error = _loss_and_error(logits, wanted, settings)
            loss += found
            if needs_grad:
                error *= scale
                parts = error.to(rows.dtype), error.sum(0), rows[inside], embeddings
                add_gradients(grads, *parts, inside)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(agree)
        ctx.scale, ctx.dtype = scale, rows.dtype
        return loss, agree

    @staticmethod
    def backward(ctx: Any, *grads):
        incoming = grads[0] / ctx.scale
        results = ((x * incoming.to(x.dtype)).to(ctx.dtype) for x in ctx.saved_tensors)
        return (*results, None)


def _loss_and_error(
    logits: torch.Tensor, wanted: torch.Tensor, settings: _SoftTarget
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of scores (rows, vocabulary), and its gradient with respect to them."""
    if settings.measure == "mse":  # over the tokens that the teacher has
        known = wanted.isfinite()
        count = known.sum(-1, keepdim=True).clamp(min=1)
        difference = torch.where(known, logits - wanted, 0.0)
        return (difference.square() / count).sum(), difference * (2 / count)
    t = settings.temperature
    student, teacher = ((scores / t).log_softmax(-1) for scores in (logits, wanted))
    target = teacher.exp()
    loss = torch.where(target > 0, target * (teacher - student), 0.0).sum()
    return loss * t**2, (student.exp_() - target) * t
