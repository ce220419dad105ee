"""StableAdamW compared with the paper's algorithm and with torch-optimi."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.param_groups import set_lr
from tests.helpers.simulated_zero import LayersModel, gradients, train_whole

LR, DECAY, EPS = 0.1, 0.1, 1e-6


def test_stable_adamw_follows_the_paper() -> None:
    """Algorithm 2 of Wortsman et al. 2023 in float64; gradients that grow a hundredfold."""
    model = LayersModel()
    names = dict(model.named_parameters())
    want = {n: p.detach().numpy().astype(np.float64) for n, p in names.items()}
    moments = {n: (np.zeros_like(w), np.zeros_like(w)) for n, w in want.items()}
    scaled = 0
    for step in range(6):
        for name, p in names.items():
            g = gradients(model, step)[p].numpy().astype(np.float64)
            m, u = moments[name]
            m, u = 0.9 * m + 0.1 * g, 0.999 * u + 0.001 * g * g
            moments[name] = m, u
            m_hat, u_hat = m / (1 - 0.9 ** (step + 1)), u / (1 - 0.999 ** (step + 1))
            rms = np.sqrt(np.mean(g * g / np.maximum(u_hat, EPS**2)))
            rate = LR / max(1.0, rms)
            scaled += rms > 1.01
            decays = p.ndim == 2 and not name.startswith("heads.")
            decay = rate * DECAY * want[name] if decays else 0.0
            want[name] = want[name] - decay - rate * m_hat / (np.sqrt(u_hat) + EPS)
    assert scaled
    found = train_whole(OptimizerConfig(kind="stable_adamw", weight_decay=DECAY), range(6), LR)
    for name, p in found.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), want[name], rtol=2e-5, atol=1e-6)


def test_stable_adamw_equals_torch_optimi() -> None:
    optimi = pytest.importorskip("optimi", reason="torch-optimi is not installed")
    model, reference = LayersModel(), LayersModel()
    config = OptimizerConfig(kind="stable_adamw", weight_decay=0.0)
    ours = build_optimizer(model, config, zero_stage=0, checked=False)
    settings: dict[str, Any] = dict(lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=0.0)
    theirs = optimi.StableAdamW(reference.parameters(), triton=False, **settings)
    for step in range(6):
        for each in (model, reference):
            for parameter, gradient in gradients(each, step).items():
                parameter.grad = gradient
        set_lr(ours.param_groups, LR)
        ours.step()
        theirs.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6)
