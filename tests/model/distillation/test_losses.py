"""Against torch's own losses and loops over texts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.distillation.losses import (
    group_log_softmax,
    relation_losses,
    soft_label_loss,
    state_losses,
)


def scores(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape, requires_grad=True), torch.randn(*shape)


def kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """torch's, summed."""
    return F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True
    )


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_classes(temperature) -> None:
    student, teacher = scores(7, 4)
    wanted = kl(student / temperature, teacher / temperature) * temperature**2
    found = soft_label_loss("classes", student, teacher, temperature=temperature)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, student), torch.autograd.grad(wanted, student)
    )
    assert float(soft_label_loss("classes", teacher, teacher)) == 0


def test_each_label_is_a_class_of_two() -> None:
    student, teacher = scores(5, 3)
    pairs = [torch.stack([x, torch.zeros_like(x)], -1) for x in (student, teacher)]
    found = soft_label_loss("labels", student, teacher)
    torch.testing.assert_close(found, kl(*pairs) / 3)


def test_a_softmax_over_each_group() -> None:
    student, teacher = scores(6, 2)
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    parts = [slice(0, 3), slice(3, 5), slice(5, 6)]
    each = [kl(student[part].t() / 2, teacher[part].t() / 2) for part in parts]
    found = soft_label_loss("groups", student, teacher, groups, temperature=2.0)
    torch.testing.assert_close(found, sum(each) / 2 * 4)
    normal = group_log_softmax(teacher, groups)
    torch.testing.assert_close(normal[3:5], teacher[3:5].log_softmax(0))


def test_hard_labels_are_the_teachers_best_classes() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(7, 5, requires_grad=True), torch.randn(7, 5)
    best = F.cross_entropy(student, teacher.argmax(-1), reduction="sum")
    found = soft_label_loss("classes", student, teacher, measure="hard")
    torch.testing.assert_close(found, best)
    one, other = (torch.autograd.grad(x, student)[0] for x in (found, best))
    torch.testing.assert_close(one, other)
    wanted = F.binary_cross_entropy_with_logits(student, (teacher > 0).float(), reduction="none")
    found = soft_label_loss("labels", student, teacher, measure="hard")
    torch.testing.assert_close(found, wanted.mean(-1).sum())
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    parts = [slice(0, 3), slice(3, 7)]
    each = [F.cross_entropy(student[x].T, teacher[x].argmax(0), reduction="sum") for x in parts]
    found = soft_label_loss("groups", student, teacher, groups, measure="hard")
    torch.testing.assert_close(found, sum(each) / 5)


@pytest.mark.parametrize(("kind", "measure"), [("number", "kl"), ("classes", "mse")])
def test_squared_errors(kind, measure) -> None:
    student, teacher = scores(5, 4)
    found = soft_label_loss(kind, student, teacher, measure=measure, temperature=7.0)
    torch.testing.assert_close(found, F.mse_loss(student, teacher) * 5)


def test_states() -> None:
    student, teacher = scores(2, 3, 8)
    found = state_losses(student, teacher, "mse").mean()
    torch.testing.assert_close(found, F.mse_loss(student, teacher))
    cosine = F.cosine_embedding_loss(student.view(6, 8), teacher.view(6, 8), torch.ones(6))
    torch.testing.assert_close(state_losses(student, teacher, "cosine").mean(), cosine)


@pytest.mark.parametrize("measure", ["kl", "mse"])
def test_relations_are_those_of_each_text_alone(measure, monkeypatch) -> None:
    """Two packed rows against a loop over texts and heads. Widths may differ. Some rows at a time
    make no difference."""
    ids = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 1, 1, 1, 1]])
    ours = torch.randn(2, 6, 8, requires_grad=True), torch.randn(2, 6, 8)
    theirs = torch.randn(2, 6, 12), torch.randn(2, 6, 12)
    wanted = torch.zeros(2, 6)
    for row in range(2):
        for text in (0, 1):
            (at,) = (ids[row] == text).nonzero(as_tuple=True)
            for head in range(4):
                parts = [
                    (a[row, at, head * d : head * d + d] @ b[row, at, head * d : head * d + d].t())
                    * d**-0.5
                    for (a, b), d in ((ours, 2), (theirs, 3))
                ]
                if measure == "mse":
                    each = (parts[0] - parts[1]).square().mean(-1)
                else:
                    logs = [part.log_softmax(-1) for part in parts]
                    each = F.kl_div(*logs, reduction="none", log_target=True).sum(-1)
                wanted = wanted.index_put((torch.tensor(row), at), each / 4, accumulate=True)
    seen = ids[:, :, None] == ids[:, None, :]
    grads = []
    for most in (1 << 24, 1):
        monkeypatch.setattr("palm_ds.model.distillation.losses._PAIRS_AT_ONCE", most)
        found = relation_losses(ours, theirs, seen, heads=4, measure=measure)
        torch.testing.assert_close(found * (ids >= 0), wanted)
        grads += torch.autograd.grad(found.sum(), ours[0])
    torch.testing.assert_close(*grads)
    same = relation_losses(theirs, theirs, seen, heads=4, measure=measure)
    assert float(same.abs().max()) == 0
