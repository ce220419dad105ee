"""Every masked-LM loss against the plain one, for awkward shapes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.masked_lm_loss import masked_lm_loss

TOLERANCE = {torch.float32: dict(atol=2e-5, rtol=1e-4), torch.bfloat16: dict(atol=5e-2, rtol=5e-2)}


@pytest.mark.parametrize("kernel", ["chunked", "linear_cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "hidden", "vocab"), [(1, 1, 2), (5, 7, 3), (131, 16, 101), (300, 9, 64)]
)
def test_equals_plain(n: int, hidden: int, vocab: int, dtype: torch.dtype, kernel: str) -> None:
    if kernel == "linear_cross_entropy" and not hasattr(F, kernel):
        pytest.skip(f"torch {torch.__version__} has no {kernel}")
    torch.manual_seed(n)
    targets = torch.randint(0, vocab, (n,))
    values = [torch.randn(*shape).to(dtype) for shape in ((n, hidden), (vocab, hidden), (vocab,))]
    results = []
    for which in ("plain", kernel):
        leaves = [x.clone().requires_grad_() for x in values]
        loss, correct = masked_lm_loss(*leaves, targets, which)
        assert loss.dtype == torch.float32 and loss.ndim == 0
        (loss * 0.01).backward()
        results.append((loss.detach() / n, correct, *(x.grad for x in leaves)))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, **TOLERANCE[dtype])


def test_chunked_masked_lm_loss_is_stable_for_large_scores_and_needs_no_gradient() -> None:
    rows, embeddings = torch.full((3, 2), 100.0), torch.tensor([[100.0, 100.0], [-100.0, 0.0]])
    targets = torch.tensor([0, 1, 0])
    loss, correct = masked_lm_loss(rows, embeddings, torch.zeros(2), targets, "chunked")
    assert not loss.requires_grad and correct == 2
    assert loss.item() == pytest.approx(30000.0)  # 100 * 200 + 100 * 100, for the second row


def test_frozen_embeddings_get_no_gradient() -> None:
    rows, embeddings = torch.randn(4, 3, requires_grad=True), torch.randn(6, 3)
    loss, _ = masked_lm_loss(rows, embeddings, torch.zeros(6), torch.arange(4), "chunked")
    loss.backward()
    assert rows.grad is not None and embeddings.grad is None
