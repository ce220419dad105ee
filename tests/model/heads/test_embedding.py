"""Losses of vectors equal those of sentence-transformers on the same vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from palm_ds.model.heads.embedding import (
    ContrastiveHead,
    SimilarityHead,
    VectorSettings,
    info_nce,
    known_pairs,
)

NEGATIVES = 2


@pytest.fixture(scope="module")
def reference() -> Any:
    pytest.importorskip("sentence_transformers", reason="no sentence-transformers to compare with")
    from sentence_transformers.sentence_transformer import losses

    return losses


def columns(count: int, texts: int) -> list[torch.Tensor]:
    """`texts` columns of `count` vectors."""
    torch.manual_seed(count)
    return list(torch.randn(texts, count, 8))


def flat(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors row by row, and their groups."""
    stacked = torch.stack(texts, 1)
    groups = torch.arange(len(stacked)).repeat_interleave(len(texts))
    return stacked.flatten(0, 1), groups


def targets(count: int, teacher: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of a query, a positive and negatives, all different texts."""
    roles = torch.tensor([0, 1, *[2] * NEGATIVES]).repeat(count)
    out = torch.stack([roles, torch.arange(len(roles)), torch.zeros_like(roles)], 1)
    if teacher is not None:
        out[roles > 0, 2] = teacher.flatten().view(torch.int32).long()
    return out


def test_info_nce_is_multiple_negatives_ranking(reference: Any) -> None:
    texts = columns(6, 2 + NEGATIVES)
    loss = reference.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=10.0)
    expected = loss.compute_loss_from_embeddings(texts, torch.zeros(6))
    vectors, groups = flat(texts)
    head = ContrastiveHead(VectorSettings(), temperature=0.1)
    found = head.step_losses(vectors, targets(6), groups)
    assert found.losses.mean().item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "reference_name"), [("kl", "DistillKLDivLoss"), ("margin_mse", "MarginMSELoss")]
)
def test_distillation(reference: Any, name: Any, reference_name: str) -> None:
    texts, teacher = columns(5, 2 + NEGATIVES), torch.randn(5, 1 + NEGATIVES)
    loss = getattr(reference, reference_name)(torch.nn.Identity())
    expected = loss.compute_loss_from_embeddings(texts, teacher)
    head = ContrastiveHead(VectorSettings(similarity="dot"), temperature=1.0, distillation=name)
    vectors, groups = flat(texts)
    found = head.step_losses(vectors, targets(5, teacher), groups)
    assert found.losses.mean().item() == pytest.approx(expected.item(), abs=1e-5)
    head.distillation_share = 0.25
    plain = ContrastiveHead(VectorSettings(similarity="dot"), temperature=1.0)
    other = plain.step_losses(vectors, targets(5), groups).losses.mean().item()
    mixed = head.step_losses(vectors, targets(5, teacher), groups).losses.mean().item()
    assert mixed == pytest.approx(0.25 * expected.item() + 0.75 * other, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "reference_name"), [("cosent", "CoSENTLoss"), ("cosine", "CosineSimilarityLoss")]
)
def test_similarity(reference: Any, name: Any, reference_name: str) -> None:
    texts, wanted = columns(7, 2), torch.rand(7)
    wanted[3] = wanted[4]  # equal labels are in no order
    loss = getattr(reference, reference_name)(torch.nn.Identity())
    expected = loss.compute_loss_from_embeddings(texts, wanted)
    vectors, groups = flat(texts)
    head = SimilarityHead(VectorSettings(), loss=name, temperature=0.05)
    found = head.step_losses(vectors, wanted.repeat_interleave(2), groups)
    assert found.losses.mean().item() == pytest.approx(expected.item(), abs=1e-5)
    assert found.correct.isnan().all()


def test_matryoshka_adds_the_losses_of_the_first_numbers() -> None:
    vectors, groups = flat(columns(6, 2 + NEGATIVES))
    both = ContrastiveHead(VectorSettings(matryoshka={3: 0.5, 5: 2.0}))
    one = ContrastiveHead(VectorSettings())
    parts = [one.step_losses(vectors[:, :size], targets(6), groups).losses for size in (8, 3, 5)]
    found = both.step_losses(vectors, targets(6), groups).losses
    torch.testing.assert_close(found, parts[0] + 0.5 * parts[1] + 2 * parts[2])


def test_a_margin_makes_the_positive_less_similar() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 2.0]])
    none = torch.zeros(2, 3, dtype=torch.bool)
    losses, correct = info_nce(scores, torch.tensor([0, 1]), none, margin=1.5)
    expected = [
        -torch.tensor([0.5, 1.0, 0.0]).log_softmax(0)[0],
        -torch.tensor([0.0, 1.5, 2.0]).log_softmax(0)[1],
    ]
    torch.testing.assert_close(losses, torch.stack(expected))
    assert correct.tolist() == [True, True]  # without the margin


def test_texts_that_answer_a_query_are_not_its_negatives() -> None:
    """Two rows have the same query; a positive is a negative elsewhere; a query is a text too."""
    queries = torch.tensor([10, 11, 10, 12])
    texts = torch.tensor([1, 2, 3, 4, 1, 12, 2])  # positives of the rows, then negatives
    known = known_pairs(queries, texts, torch.tensor([0, 1, 2, 3]))
    assert known.int().tolist() == [
        [1, 0, 1, 0, 1, 0, 0],
        [0, 1, 0, 0, 0, 0, 1],
        [1, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 1, 0, 1, 0],
    ]
    scores = torch.randn(4, 7)
    losses, _ = info_nce(scores, torch.tensor([0, 1, 2, 3]), known)
    expected = -scores[0, [0, 1, 3, 5, 6]].log_softmax(0)[0]
    torch.testing.assert_close(losses[0], expected)


def test_a_repeated_row_changes_no_gradient_direction() -> None:
    """The same row twice: each is masked for the other, so the mean loss stays."""
    vectors, groups = flat(columns(4, 2 + NEGATIVES))
    head = ContrastiveHead(VectorSettings())
    wanted = targets(4)
    once = head.step_losses(vectors[:12], wanted[:12], groups[:12]).losses
    again = torch.cat([vectors[:12], vectors[:4]])
    groups_again = torch.cat([groups[:12], torch.full((4,), 3)])
    twice = head.step_losses(again, torch.cat([wanted[:12], wanted[:4]]), groups_again).losses
    assert twice[0] == pytest.approx(twice[3].item()) and len(twice) == 4
    # Its negatives are there twice now, but its positive is not among them.
    assert twice[0] >= once[0]


def test_one_query_alone_has_no_loss() -> None:
    vectors, groups = flat(columns(1, 2))
    wanted = torch.tensor([[0, 5, 0], [1, 6, 0]])
    found = ContrastiveHead(VectorSettings()).step_losses(vectors, wanted, groups)
    assert found.losses.tolist() == [0.0] and found.correct.tolist() == [1.0]


def test_texts_without_a_query_are_negatives_of_all() -> None:
    vectors, _ = flat(columns(3, 2))
    wanted = torch.tensor([[0, 1, 0], [1, 2, 0], [2, 3, 0], [0, 4, 0], [1, 5, 0], [2, 6, 0]])
    groups = torch.tensor([0, 0, 1, 2, 2, 3])
    found = ContrastiveHead(VectorSettings(similarity="dot"), temperature=1.0)
    losses = found.step_losses(vectors, wanted, groups).losses
    scores = vectors[[0, 3]] @ vectors[[1, 2, 4, 5]].T
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 2]), reduction="none")
    torch.testing.assert_close(losses, expected)
