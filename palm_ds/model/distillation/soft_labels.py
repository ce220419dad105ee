"""Soft labels: a teacher's scores as labels of a task, besides those of the data.

In a batch, those of `task` are the labels `teacher.task`: their positions are those of the task's
labels, also of texts without one; their targets are the teacher's scores (n, any).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from palm_ds.model.distillation.losses import soft_label_loss
from palm_ds.model.distillation.settings import LogitsSettings
from palm_ds.model.distillation.soft_vocabulary_loss import (
    TokenProjection,
    TopScores,
    soft_vocabulary_loss,
)
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import HeadOutput, MaskedLMHead, SoftKind
from palm_ds.model.inputs.batch import VocabularyScores

_PREFIX = "teacher."


def soft_name(part: str) -> str:
    """The name of a task's soft labels, and of the loss of any part that a teacher teaches."""
    return _PREFIX + part


def soft_kind(head: nn.Module) -> SoftKind:
    """Kind of a head's scores; a user's head may be any module."""
    return getattr(head, "soft", "")


def scores_of(
    head: nn.Module, rows: torch.Tensor, groups: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The scores (n, any) of a head that a student learns from."""
    scores = cast(Any, head).logits(rows, *groups)
    return scores[:, 1:] if isinstance(head, CRFHead) else scores  # the first is the best tag


def soft_loss(
    head: nn.Module,
    rows: torch.Tensor,
    groups: tuple[torch.Tensor, ...],
    teacher: torch.Tensor | VocabularyScores | None,
    settings: LogitsSettings,
) -> HeadOutput:
    """The summed loss of a head's rows (n, hidden), and how often student and teacher agree on the
    best class (NaN where there is none). Without a teacher, as in a batch without labels, it
    computes the same and means nothing."""
    if isinstance(head, MaskedLMHead):
        assert not isinstance(teacher, torch.Tensor)
        words = head.transform(rows), head.output_embeddings, head.output_bias
        return HeadOutput(
            *soft_vocabulary_loss(
                *words,
                teacher or _dummy(rows),
                measure=settings.loss,
                temperature=settings.temperature,
            )
        )
    scores, kind = scores_of(head, rows, groups), soft_kind(head)
    wanted = scores.detach() if teacher is None else cast(torch.Tensor, teacher)
    loss = soft_label_loss(
        kind,
        scores,
        wanted,
        groups[0] if groups else None,
        measure=settings.loss,
        temperature=settings.temperature,
    )
    if kind != "classes" or groups:  # where it would be words, the loss counts sentences
        return HeadOutput(loss, torch.full_like(loss.detach(), torch.nan))
    return HeadOutput(loss, (scores.detach().argmax(-1) == wanted.argmax(-1)).sum())


def _dummy(rows: torch.Tensor) -> VocabularyScores:
    """Scores for the one row of a batch without labels."""
    zero = torch.zeros(len(rows), 1, device=rows.device)
    return TopScores(zero.long(), zero)


def word_scores(head: MaskedLMHead, rows: torch.Tensor) -> TokenProjection:
    """A teacher's scores of the vocabulary for rows (n, hidden)."""
    return TokenProjection(
        head.transform(rows), head.output_embeddings.detach(), head.output_bias.detach()
    )
