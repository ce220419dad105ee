"""Sparse vectors and their losses equal those of sentence-transformers' SparseEncoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.flops import training_flops
from palm_ds.model.heads.embedding import ContrastiveHead, VectorSettings
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.heads.splade import FlopsRegularizer, SpladeHead
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.splade import largest, splade_vectors
from palm_ds.train.plan.work import encoder_passes, work_of
from tests.model.heads.test_embedding import columns, flat, targets

LENGTHS = [4, 1, 6]
CONFIG: dict[str, Any] = {"vocab_size": 30, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
CONFIG |= {"max_positions": 16, "dropout": 0.0}


@pytest.fixture(scope="module")
def sparse() -> Any:
    pytest.importorskip("sentence_transformers", reason="no sentence-transformers to compare with")
    from sentence_transformers import sparse_encoder

    return sparse_encoder


def test_vectors_and_gradients_are_those_of_splade_pooling(sparse: Any) -> None:
    """Its padded batch of logits, in training."""
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    torch.manual_seed(0)
    given = [torch.randn(shape, requires_grad=True) for shape in ((11, 6), (9, 6), (9,))]
    found = splade_vectors(given[0], LENGTHS, *given[1:])
    logits = F.linear(*given).split(LENGTHS)
    padded = torch.nn.utils.rnn.pad_sequence(list(logits), batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in LENGTHS], batch_first=True)
    features = {"token_embeddings": padded, "attention_mask": real}
    wanted = SpladePooling().train()(features)["sentence_embedding"]
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(found)
    for mine, its in zip(
        *(torch.autograd.grad((x * weights).sum(), given) for x in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(mine, its)
    assert (found == 0).any()


def test_only_the_largest_numbers_are_kept(sparse: Any) -> None:
    from sentence_transformers.util import select_max_active_dims

    vectors = torch.rand(5, 12)
    torch.testing.assert_close(largest(vectors, 3), select_max_active_dims(vectors, 3))
    assert largest(vectors, 99) is vectors


def packed(rows: list[list[torch.Tensor]], *, labels: bool = True) -> Batch:
    """Texts of ids in rows of 16, each labeled at its first token."""
    batch = Batch.from_rows(
        [
            [PackedText(input_ids=x.numpy(), token_type_ids=np.zeros(len(x), int)) for x in row]
            for row in rows
        ],
        length=16,
        pad=0,
    )
    at = [16 * r + sum(map(len, row[:n])) for r, row in enumerate(rows) for n in range(len(row))]
    given = torch.tensor(at), torch.zeros(len(at), 3, dtype=torch.int64)
    groups = {"found": torch.arange(len(at))}
    return replace(batch, labels={"found": given}, groups=groups) if labels else batch


class _Named(torch.nn.Module):
    """What sentence-transformers' losses ask of a model."""


def test_losses_are_those_of_splade_loss(sparse: Any) -> None:
    texts = [column.relu() for column in columns(6, 4)]
    model: Any = _Named()
    model.similarity_fn_name = "dot"
    ranking = sparse.losses.SparseMultipleNegativesRankingLoss(model)
    expected = ranking.compute_loss_from_embeddings(texts, torch.zeros(6))
    penalty = sparse.losses.FlopsLoss(model).compute_loss_from_embeddings
    head = _head(FlopsRegularizer(queries=0.3, documents=0.7, warmup=0.5))
    vectors, groups = flat(texts)
    for progress, share in ((0.0, 0.0), (0.25, 0.25), (0.5, 1.0), (0.9, 1.0), (None, 0.0)):
        found = head.step_losses(vectors, targets(6), groups, progress).losses.mean()
        own = 0.3 * penalty(texts[0]) + 0.7 * penalty(torch.cat(texts[1:]))
        assert found.item() == pytest.approx((expected + share * own).item(), rel=1e-5)


@pytest.mark.parametrize("name", ["margin_mse", "kl"])
def test_distillation(sparse: Any, name: Any) -> None:
    texts, teacher = [column.relu() for column in columns(5, 4)], torch.randn(5, 3)
    margin, kl = sparse.losses.SparseMarginMSELoss, sparse.losses.SparseDistillKLDivLoss
    loss = margin(_Named()) if name == "margin_mse" else kl(_Named(), temperature=1.0)
    expected = loss.compute_loss_from_embeddings(texts, teacher)
    vectors, groups = flat(texts)
    found = _head(distillation=name).step_losses(vectors, targets(5, teacher), groups)
    assert found.losses.mean().item() == pytest.approx(expected.item(), abs=1e-5)


def _head(regularizer: FlopsRegularizer | None = None, **ranking: Any) -> SpladeHead:
    torch.manual_seed(1)
    nothing = FlopsRegularizer(queries=0.0, documents=0.0)
    contrast = ContrastiveHead(VectorSettings(similarity="dot"), temperature=1.0, **ranking)
    return SpladeHead(build_encoder(EncoderConfig(**CONFIG)), contrast, regularizer or nothing)


def test_it_has_the_parameters_of_a_masked_lm_head() -> None:
    head = _head()
    plain = MaskedLMHead(build_encoder(EncoderConfig(**CONFIG)))
    assert {n: p.shape for n, p in head.state_dict().items()} == {
        n: p.shape for n, p in plain.state_dict().items()
    }


def test_a_text_has_the_same_vector_whatever_shares_its_row() -> None:
    """Three texts in two rows with padding between; a batch without labels has no vectors."""
    backbone = build_encoder(EncoderConfig(**CONFIG))
    head = SpladeHead(backbone, _head().ranking, _head().regularizer)
    model = Model(backbone, {"found": head}, {"found": "found"}).eval()
    texts = [torch.randint(5, 30, (n,)) for n in (4, 7, 5)]
    together = model(packed([[texts[0], texts[1]], [texts[2]]]))["found"].scores
    alone = torch.cat([model(packed([[text]]))["found"].scores for text in texts])
    torch.testing.assert_close(together, alone)
    assert together.shape == (3, 30)
    empty = model(packed([[texts[0]]], labels=False))["found"]
    assert empty.scores.shape == (0, 30) and empty.loss_sum == 0


def test_flops_have_a_product_with_the_vocabulary_for_every_token() -> None:
    """As torch counts the forward pass, of one text that fills its row. Backward, only the token
    that is the largest of a word gets a gradient."""
    config = EncoderConfig(**CONFIG)
    backbone = build_encoder(config)
    head = SpladeHead(backbone, _head().ranking, _head().regularizer)
    model = Model(backbone, {"found": head}, {"found": "found"})
    batch = packed([[torch.randint(5, 30, (16,))]])
    ((_, *tasks),) = encoder_passes(model)
    ours = float(training_flops(config, batch, *tasks))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch)
    pooler = 2 * 8 * 8  # at one token; it does not count
    assert counter.get_total_flops() == pytest.approx(ours / 3 + pooler)
    assert work_of(model, [batch], rows=1).flops(config) == pytest.approx(ours)
