"""LAMB compared with the paper's algorithm."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer


def test_lamb_follows_the_paper() -> None:
    """Algorithm 2 of You et al. 2020 in float64, three steps of one matrix and one bias."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"backbone": nn.Linear(5, 3)})
    layer: nn.Linear = model["backbone"]  # type: ignore[assignment]
    config = OptimizerConfig(kind="lamb", lr=0.02, weight_decay=0.1, clip=0.0, eps=1e-6)
    optimizer = build_optimizer(model, config, zero_stage=0, checked=True)
    want = {n: p.detach().numpy().astype(np.float64) for n, p in layer.named_parameters()}
    moments = {n: (np.zeros_like(w), np.zeros_like(w)) for n, w in want.items()}
    for step in (1, 2, 3):
        for name, p in layer.named_parameters():
            g = np.random.default_rng([step, p.ndim]).normal(size=tuple(p.shape))
            p.grad = torch.tensor(g, dtype=torch.float32)
            m = 0.9 * moments[name][0] + 0.1 * g
            v = 0.999 * moments[name][1] + 0.001 * g * g
            moments[name] = (m, v)
            update = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-6)
            if p.ndim == 2:
                update = update + 0.1 * want[name]
                update *= np.linalg.norm(want[name]) / np.linalg.norm(update)
            want[name] = want[name] - 0.02 * update
        optimizer.step()
    for name, p in layer.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), want[name], rtol=2e-5, atol=1e-7)
