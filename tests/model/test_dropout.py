"""Every dropout implementation drops the right fraction."""

from __future__ import annotations

import pytest
import torch

from palm_ds.model.dropout import add_dropout, keep_mask, keep_rate


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1000, 777)])
def test_keep_mask_has_the_rate(shape: tuple[int, ...], rate: float) -> None:
    torch.manual_seed(1)
    mask = keep_mask(torch.empty(shape), rate)
    assert mask.shape == shape and set(mask.unique().tolist()) <= {0.0, 1.0}
    assert abs(keep_rate(rate) - (1 - rate)) < 1e-5
    if mask.numel() > 1000:
        error = (rate * (1 - rate) / mask.numel()) ** 0.5
        assert abs(mask.mean().item() - keep_rate(rate)) < 5 * error
        quarters = mask.flatten()[: mask.numel() // 4 * 4].view(-1, 4)  # one draw makes four
        assert (quarters.mean(0) - keep_rate(rate)).abs().max() < 10 * error
        assert torch.corrcoef(quarters.T).fill_diagonal_(0).abs().max() < 0.01


@pytest.mark.parametrize("kernel", ["plain", "bits"])
def test_dropout(kernel: str) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(40, 60, requires_grad=True), torch.randn(40, 60, requires_grad=True)
    out = add_dropout(x, y, 0.25, kernel)
    upstream = torch.randn(40, 60)
    out.backward(upstream)
    change = (out - x).detach()
    dropped = change == 0
    assert 0.15 < dropped.float().mean() < 0.35
    torch.testing.assert_close(change[~dropped], y.detach()[~dropped] / 0.75, atol=1e-5, rtol=1e-5)
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, upstream)
    torch.testing.assert_close(y.grad, torch.where(dropped, 0.0, upstream / 0.75))
    assert torch.equal(add_dropout(x, y, 0.0, kernel), x + y)
