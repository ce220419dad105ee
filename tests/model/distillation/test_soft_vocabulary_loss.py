"""Against torch on all scores together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.distillation.soft_vocabulary_loss import (
    MeanScores,
    TokenProjection,
    soft_vocabulary_loss,
    top_scores,
)

ROWS, WORDS = 300, 50  # three chunks on a CPU
CPU = torch.device("cpu")


def head(hidden: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    shapes = ((ROWS, hidden), (WORDS, hidden), (WORDS,))
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


@pytest.mark.parametrize("measure", ["kl", "mse", "hard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loss_and_gradients(measure, dtype) -> None:
    ours, theirs = head(8, dtype), [x.detach().float() for x in head(16)]
    teacher = TokenProjection(*theirs)
    options: Any = {"measure": measure, "temperature": 2.0 if measure == "kl" else 1.0}
    loss, agree = soft_vocabulary_loss(*ours, teacher, **options)
    wide = [x.detach().float().requires_grad_() for x in ours]
    student, scores = F.linear(*wide), F.linear(*theirs)
    if measure == "mse":
        wanted = F.mse_loss(student, scores) * ROWS
    elif measure == "hard":
        wanted = F.cross_entropy(student, scores.argmax(-1), reduction="sum")
    else:
        logs = (student / 2).log_softmax(-1), (scores / 2).log_softmax(-1)
        wanted = F.kl_div(*logs, reduction="sum", log_target=True) * 4
    close: Any = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(loss, wanted, **close)
    assert abs(int(agree) - int((student.argmax(-1) == scores.argmax(-1)).sum())) <= 2
    found = torch.autograd.grad(loss * 0.5, ours)
    for mine, its in zip(found, torch.autograd.grad(wanted * 0.5, wide), strict=True):
        torch.testing.assert_close(mine.float(), its, **close)


def test_the_best_tokens_alone() -> None:
    """All of them are the same as the scores; a few are a distribution over these."""
    ours, theirs = head(8), [x.detach() for x in head(16)]
    teacher = TokenProjection(*theirs)
    every = top_scores(teacher, WORDS, WORDS, CPU)
    whole, _ = soft_vocabulary_loss(*ours, teacher)
    torch.testing.assert_close(soft_vocabulary_loss(*ours, every)[0], whole)
    few = top_scores(teacher, 5, WORDS, CPU)
    scores = F.linear(*theirs)
    best = scores.topk(5).values[:, -1:]
    target = scores.masked_fill(scores < best, -torch.inf).softmax(-1)
    wanted = F.kl_div(F.linear(*ours).log_softmax(-1), target, reduction="sum")
    torch.testing.assert_close(soft_vocabulary_loss(*ours, few)[0], wanted)


def test_several_teachers_and_more_tokens_than_they_have() -> None:
    ours, one, two = head(8), head(16), head(4)
    parts = [(0.75, TokenProjection(*one)), (0.25, TokenProjection(*two))]
    scores = F.linear(*one) * 0.75 + F.linear(*two) * 0.25
    torch.testing.assert_close(MeanScores(parts).scores(slice(3, 9), WORDS), scores[3:9])
    padded = TokenProjection(*one).scores(slice(0, 2), WORDS + 1)
    assert padded.shape == (2, WORDS + 1) and float(padded[0, -1].detach()) == -torch.inf
    assert float(soft_vocabulary_loss(*ours, MeanScores(parts))[0].detach()) > 0


def test_squared_errors_are_over_the_tokens_that_the_teacher_has() -> None:
    ours, theirs = head(8), [x.detach() for x in head(16)]
    fewer = [theirs[0], theirs[1][:-2], theirs[2][:-2]]
    loss, _ = soft_vocabulary_loss(*ours, TokenProjection(*fewer), measure="mse")
    wanted = F.mse_loss(F.linear(*ours)[:, :-2], F.linear(*fewer)) * ROWS
    torch.testing.assert_close(loss, wanted)
    for mine, its in zip(*(torch.autograd.grad(x, ours) for x in (loss, wanted)), strict=True):
        torch.testing.assert_close(mine, its)
