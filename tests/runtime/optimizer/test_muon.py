"""Muon compared with torch's, and proof that it is Muon wherever it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.lora import LoraSettings
from palm_ds.runtime.optimizer import muon
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.param_groups import is_hidden_matrix
from tests.helpers.simulated_zero import LayersModel, as_zero_1, gradients, train_cut, train_whole
from tests.helpers.tied_model import TiedModel
from tests.model.test_lora import INNER, SIZE, adapted

MUON = OptimizerConfig(kind="muon", weight_decay=0.1)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch(adjust: str, nesterov: bool) -> None:
    """Queries, keys and values are matrices of their own; what is not hidden takes AdamW's step."""
    options = {"adjust_lr": adjust, "nesterov": nesterov, "momentum": 0.9}
    config = OptimizerConfig(kind="muon", weight_decay=0.1, options=options)
    found, reference = train_whole(config, range(5)), LayersModel()
    adamw = train_whole(OptimizerConfig(kind="adamw", weight_decay=0.1), range(5))
    named = dict(reference.named_parameters())
    parts = {
        name: [part.clone() for part in p.detach().chunk(3 if "qkv" in name else 1)]
        for name, p in named.items()
        if is_hidden_matrix(name, p)
    }
    flat = [part for some in parts.values() for part in some]
    settings: dict[str, Any] = dict(nesterov=nesterov, momentum=0.9, adjust_lr_fn=adjust)
    theirs = torch.optim.Muon(flat, lr=0.1, weight_decay=0.1, **settings)
    for step in range(5):
        wanted = gradients(reference, step)
        for name, some in parts.items():
            for part, gradient in zip(some, wanted[named[name]].chunk(len(some)), strict=True):
                part.grad = gradient
        theirs.step()
    for (name, p), q in zip(found.named_parameters(), adamw.parameters(), strict=True):
        expected = torch.cat(parts[name]) if name in parts else q
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
    assert len(parts) == 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_matrix_is_orthogonalized_under_zero(world: int, monkeypatch) -> None:
    """Counts the calls: Muon that silently is another optimizer would make none."""
    calls: list[torch.Size] = []
    original = muon.orthogonalize

    def counted(matrix: torch.Tensor, steps: int) -> torch.Tensor:
        calls.append(matrix.shape)
        update = original(matrix, steps)
        values = torch.linalg.svdvals(update.float())
        assert values.max() < 1.3 and values.median() > 0.6  # iterations leave about 0.7 to 1.2
        return update

    whole = train_whole(MUON, range(4))
    monkeypatch.setattr(muon, "orthogonalize", counted)
    found = train_cut(MUON, range(4), cut=as_zero_1, world=world)
    for p, q in zip(found.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    matrices = 2 * (3 + 1)  # two layers with queries, keys, values and an expansion
    assert 4 * matrices <= len(calls) <= 4 * (matrices + 3 * (world - 1))
    assert {shape for shape in calls} == {(6, 6), (13, 6)}


@pytest.mark.parametrize("rank", [8, 3])
def test_matrices_of_lora_are_whole(rank: int, monkeypatch) -> None:
    """Their names go on behind those of the stacked matrices that they change."""
    calls: list[torch.Size] = []
    original = muon.orthogonalize

    def counted(matrix: torch.Tensor, steps: int) -> torch.Tensor:
        calls.append(matrix.shape)
        return original(matrix, steps)

    monkeypatch.setattr(muon, "orthogonalize", counted)
    model = adapted(LoraSettings(rank=rank, targets=("query", "intermediate")))
    optimizer = build_optimizer(model, MUON, zero_stage=0, checked=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    of_a_layer = [(rank, SIZE), (SIZE, rank), (rank, SIZE), (INNER, rank)]
    assert sorted(calls) == sorted(2 * of_a_layer)


def test_hidden_matrices_keep_only_their_momentum() -> None:
    model = LayersModel()
    optimizer = build_optimizer(model, MUON, zero_stage=0, checked=False)
    for parameter, gradient in gradients(model, 0).items():
        parameter.grad = gradient
    optimizer.step()
    for name, parameter in model.named_parameters():
        hidden = is_hidden_matrix(name, parameter)
        kept = {"momentum_buffer"} if hidden else {"exp_avg", "exp_avg_sq"}
        assert optimizer.state[parameter].keys() == {"step", *kept}


def test_what_muon_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="muon .* ZeRO 3 cuts .*stage 0, 1 or 2, or adamw"):
        build_optimizer(LayersModel(), MUON, zero_stage=3, checked=False)
    with pytest.raises(UserError, match=r"muon .* backbone.layers.N.\*, .* none; use adamw"):
        build_optimizer(TiedModel(), MUON, zero_stage=0, checked=False)
