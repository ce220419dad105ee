"""Label smoothing and weights of flows, against torch's cross-entropy."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.heads.smoothed_lm_loss import smoothed_cross_entropy, smoothed_lm_loss


def inputs(n: int, hidden: int, vocab: int) -> list[torch.Tensor]:
    torch.manual_seed(n)
    shapes = (n, hidden), (vocab, hidden), (vocab,)
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", ["plain", "chunked", "liger"])
@pytest.mark.parametrize("weights", [(), (1.6, 0.4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("n", "hidden", "vocab"), [(1, 3, 5), (131, 7, 33)])
def test_equals_torch(
    n: int, hidden: int, vocab: int, smoothing: float, weights: tuple, kernel: str, compiled: bool
) -> None:
    """`compiled`: the chunks are padded, as for a compiled function."""
    leaves, others = inputs(n, hidden, vocab), inputs(n, hidden, vocab)
    tokens = torch.randint(0, vocab, (n,))
    flows = torch.arange(n) % 2
    logits = F.linear(*others)
    each = F.cross_entropy(logits, tokens, reduction="none", label_smoothing=smoothing)
    expected = (each * torch.tensor(weights or (1.0, 1.0))[flows]).sum()
    loss, correct = smoothed_lm_loss(
        *leaves,
        torch.stack([tokens, flows], 1) if weights else tokens,
        kernel,
        smoothing=smoothing,
        weights=weights,
        compiled=smoothed_cross_entropy if compiled else None,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    assert correct == (logits.argmax(-1) == tokens).sum()
    (loss * 0.1).backward()
    (expected * 0.1).backward()
    for mine, its in zip(leaves, others, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_a_hundredth(dtype: torch.dtype) -> None:
    leaves = inputs(50, 8, 20)
    half = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    targets = torch.randint(0, 20, (50,))
    for values in (leaves, half):
        loss, _ = smoothed_lm_loss(*values, targets, "chunked", smoothing=0.1)
        loss.backward()
    for exact, rounded in zip(leaves, half, strict=True):
        assert exact.grad is not None and rounded.grad is not None
        error = (rounded.grad.float() - exact.grad).abs().max() / exact.grad.abs().max()
        assert error < 0.02
