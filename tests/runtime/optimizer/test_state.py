"""The norm of gradients compared with float64."""

from __future__ import annotations

import math

import pytest
import torch

from palm_ds.runtime.optimizer.state import total_norm


def test_the_norm_is_right_at_the_size_of_a_token_embedding() -> None:
    """torch's own fp32 norm is 6e-4 too small here."""
    torch.manual_seed(0)
    gradients = [torch.randn(30522, 512), torch.randn(512), torch.randn(3, 7).t(), torch.ones(())]
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert total_norm(gradients).item() == pytest.approx(exact, rel=2e-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_number_shows(bad: float) -> None:
    gradient = torch.zeros(40_000)
    gradient[30_000] = bad
    assert not math.isfinite(total_norm([gradient, torch.ones(3)]).item())


def test_nothing_has_norm_0() -> None:
    assert total_norm([]).item() == total_norm([torch.zeros(2, 0)]).item() == 0.0
