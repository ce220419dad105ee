"""Losses of a student that differs from its teacher; each loss is 0 where the two agree.

    soft labels   scores of a head          Hinton, Vinyals & Dean 2015, "Distilling the Knowledge
                                            in a Neural Network"
    states        vectors of tokens         TinyBERT: Jiao et al. 2020, section 3.1
    attention     scores of all tokens      the same
    relations     among queries, keys or    MiniLM: Wang et al. 2020, section 3; MiniLMv2: Wang et
                  values of a text          al. 2021, section 3

Losses of soft labels are summed over rows. The others are per token, the mean over everything that
belongs to it; a token sees the tokens of its own sequence alone.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from palm_ds.model.heads.heads import SoftKind

Measure: TypeAlias = Literal["kl", "mse"]
SoftMeasure: TypeAlias = Literal["kl", "mse", "hard"]

_MASKED_SCORE = -1e9  # a score whose softmax is 0; infinity would make KL's 0 * infinity
_PAIRS_AT_ONCE = 1 << 24  # of tokens and heads, whose scores are in memory together


def soft_label_loss(
    kind: SoftKind,
    student: torch.Tensor,
    teacher: torch.Tensor,
    groups: torch.Tensor | None = None,
    *,
    measure: SoftMeasure = "kl",
    temperature: float = 1.0,
) -> torch.Tensor:
    """The summed loss (fp32) of scores (n, any) against the teacher's (n, any).

    kl: T^2 KL(teacher || student) with both scores divided by the temperature T, so that its
    gradient does not depend on T in the limit (Hinton et al., section 2). mse: the squared
    difference of the scores, the mean over a row. hard: cross-entropy with the teacher's best
    class. `groups` (n,) int64 for kind `groups`."""
    student, teacher = student.float(), teacher.float()
    if measure == "mse" or kind == "number":
        return (student - teacher).square().mean(-1).sum()
    if measure == "hard":
        teacher = hard_scores(kind, teacher, groups)
    student, teacher = student / temperature, teacher / temperature
    if kind == "labels":
        each = _divergence(F.logsigmoid(teacher), F.logsigmoid(student))
        each = each + _divergence(F.logsigmoid(-teacher), F.logsigmoid(-student))
        return each.mean(-1).sum() * temperature**2
    if kind == "groups":
        assert groups is not None
        student, teacher = (group_log_softmax(scores, groups) for scores in (student, teacher))
        return _divergence(teacher, student).mean(-1).sum() * temperature**2
    assert kind == "classes", kind
    return _divergence(teacher.log_softmax(-1), student.log_softmax(-1)).sum() * temperature**2


def hard_scores(
    kind: SoftKind, teacher: torch.Tensor, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """Scores (n, any) whose probability is all at the teacher's best class, or at its side of 0 for
    `labels`."""
    if kind == "labels":
        return torch.where(teacher > 0, -_MASKED_SCORE, _MASKED_SCORE)
    if kind == "groups":
        assert groups is not None
        index = groups[:, None].expand_as(teacher)
        peak = torch.full_like(teacher, -torch.inf).scatter_reduce(0, index, teacher, "amax")
        return torch.where(teacher == peak.gather(0, index), 0.0, _MASKED_SCORE)
    best = teacher.argmax(-1, keepdim=True)
    return torch.full_like(teacher, _MASKED_SCORE).scatter(-1, best, 0.0)


def _divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """The terms of KL(teacher || student) of log-probabilities."""
    return teacher.exp() * (teacher - student)


def group_log_softmax(scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The log-softmax of scores (n, k) over the rows of each group, whose numbers (n,) ascend from
    0."""
    index = groups[:, None].expand_as(scores)
    floor = torch.full_like(scores, -torch.inf)
    peak = floor.scatter_reduce(0, index, scores.detach(), "amax").gather(0, index)
    shifted = scores - peak
    totals = torch.zeros_like(scores).scatter_add(0, index, shifted.exp())
    return shifted - totals.gather(0, index).log()


def state_losses(
    student: torch.Tensor, teacher: torch.Tensor, measure: Literal["mse", "cosine"]
) -> torch.Tensor:
    """Per vector, (...): the mean squared difference of vectors (..., width), or 1 - cosine."""
    student, teacher = student.float(), teacher.float()
    if measure == "mse":
        return (student - teacher).square().mean(-1)
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


def split_relations(vectors: torch.Tensor, heads: int) -> torch.Tensor:
    """Vectors (rows, length, width) in parts (rows, heads, length, width / heads)."""
    rows, length, width = vectors.shape
    return vectors.view(rows, length, heads, width // heads).transpose(1, 2)


def relation_losses(
    student: tuple[torch.Tensor, torch.Tensor],
    teacher: tuple[torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
    *,
    heads: int,
    measure: Measure = "kl",
) -> torch.Tensor:
    """Per token (rows, length): by what two matrices of relations differ, the mean over the heads.

    A relation of two tensors a, b (rows, length, width) is a b^T / sqrt(width / heads), head by
    head: of queries and keys it is attention. Token i is related to the tokens j that it attends
    to, `seen` (rows, length, length). kl: KL(teacher || student) of its softmax (MiniLM's equation
    5); mse: the mean squared difference of the scores (TinyBERT's equation 7). Some rows at a time,
    computed again for the backward pass."""
    rows, length, _ = seen.shape
    some = max(_PAIRS_AT_ONCE // (heads * length * length), 1)
    parts = [
        checkpoint(
            _relation_losses,
            *(x[first : first + some] for x in (*student, *teacher)),
            seen[first : first + some, None],
            heads,
            measure,
            use_reentrant=False,
        )
        for first in range(0, rows, some)
    ]
    return torch.cat(parts)


def _relation_losses(
    student_a: torch.Tensor,
    student_b: torch.Tensor,
    teacher_a: torch.Tensor,
    teacher_b: torch.Tensor,
    seen: torch.Tensor,
    heads: int,
    measure: Measure,
) -> torch.Tensor:
    """`seen` (rows, 1, length, length)."""
    student, teacher = _scores(student_a, student_b, heads), _scores(teacher_a, teacher_b, heads)
    if measure == "mse":
        each = ((student - teacher).square() * seen).sum(-1) / seen.sum(-1)
    else:
        student, teacher = (
            x.masked_fill(~seen, _MASKED_SCORE).log_softmax(-1) for x in (student, teacher)
        )
        each = _divergence(teacher, student).sum(-1)
    return each.mean(1)  # over the heads


def _scores(a: torch.Tensor, b: torch.Tensor, heads: int) -> torch.Tensor:
    """(rows, heads, length, length) in fp32."""
    a, b = split_relations(a.float(), heads), split_relations(b.float(), heads)
    return a @ b.transpose(-1, -2) * a.shape[-1] ** -0.5
