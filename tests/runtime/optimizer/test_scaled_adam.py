from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from palm_ds.runtime.optimizer import scaled_adam
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.param_groups import set_rates
from tests.helpers.simulated_zero import (
    LayersModel,
    as_zero_1,
    as_zero_3,
    gradients,
    train_cut,
    train_whole,
)


@pytest.mark.parametrize("kind", ["lamb", "stable_adamw"])
@pytest.mark.parametrize("cut", [as_zero_1, as_zero_3])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_cut_parameters_are_updated_as_whole_ones(kind, cut, world, monkeypatch) -> None:
    monkeypatch.setattr(scaled_adam, "_CHUNK", 20)
    config = OptimizerConfig(kind=kind, weight_decay=0.1)
    whole, start = train_whole(config, range(6)), train_whole(config, range(0))
    found = train_cut(config, range(6), cut=cut, world=world)
    others = train_whole(OptimizerConfig(kind="adamw", weight_decay=0.1), range(6))
    for p, q, r, s in zip(*(m.parameters() for m in (found, whole, others, start)), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(q, s)
        if p.ndim == 2 and p.shape[0] != 3:  # a head takes AdamW's update under LAMB
            assert not torch.allclose(q, r, rtol=1e-3)


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
        set_rates(ours.param_groups, LR)
        ours.step()
        theirs.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6)
