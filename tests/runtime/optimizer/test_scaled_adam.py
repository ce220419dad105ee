"""LAMB and StableAdamW on cut parameters equal those on whole ones."""

from __future__ import annotations

import pytest
import torch

from palm_ds.runtime.optimizer import scaled_adam
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from tests.helpers.simulated_zero import as_zero_1, as_zero_3, train_cut, train_whole


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
