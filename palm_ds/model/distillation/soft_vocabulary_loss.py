"""Distillation of masked words: soft targets over the vocabulary, a chunk of rows at a time.

    student   rows @ embeddings.T + bias  ──softmax──┐
    teacher   the same, of its own; or its top k     ┴──> loss, and the student's gradient

The gradient is computed in the forward pass, as in masked_lm_loss.py, so that
neither the student's nor the teacher's scores (n, vocabulary) ever exist for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.distillation.losses import SoftMeasure, hard_scores
from palm_ds.model.inputs.batch import VocabularyScores
from palm_ds.model.ops.masked_lm_loss import FP16_SCALE, chunk_size, chunked_loss


@dataclass(frozen=True)
class TokenProjection:
    """The scores rows @ embeddings.T + bias."""

    rows: torch.Tensor  # (n, hidden)
    embeddings: torch.Tensor  # (vocabulary, hidden)
    bias: torch.Tensor  # (vocabulary,)

    def __len__(self) -> int:
        return len(self.rows)

    def scores(self, inside: slice, size: int) -> torch.Tensor:
        logits = F.linear(self.rows[inside], self.embeddings, self.bias).float()[:, :size]
        return F.pad(logits, (0, size - logits.shape[1]), value=-torch.inf)


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
        top = teacher.scores(slice(first, first + chunk), size).log_softmax(-1).topk(k)
        ids.append(top.indices)
        values.append(top.values)
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
    score = partial(_score, _SoftTarget(teacher, measure, temperature))
    scale = FP16_SCALE / temperature
    return chunked_loss(rows, embeddings, bias, score, fp16_scale=scale)


@dataclass(frozen=True)
class _SoftTarget:
    teacher: VocabularyScores
    measure: SoftMeasure
    temperature: float


def _score(
    settings: _SoftTarget,
    logits: torch.Tensor,
    inside: slice,
    loss: torch.Tensor,
    scale: float,
    needs_grad: bool,
) -> tuple[torch.Tensor, ...]:
    dtype, logits = logits.dtype, logits.float()
    wanted = settings.teacher.scores(inside, logits.shape[1])
    agree = (logits.argmax(-1) == wanted.argmax(-1)).sum()
    if settings.measure == "hard":
        wanted = hard_scores("classes", wanted)
    addend, error = _loss_and_error(logits, wanted, settings)
    if not needs_grad:
        return loss + addend, agree
    error *= scale
    return loss + addend, agree, error.to(dtype), error.sum(0)


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
