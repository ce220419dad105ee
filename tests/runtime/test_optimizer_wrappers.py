"""Clipping, skipping, averaging and freezing, compared with torch's own optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from palm_ds.runtime.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer_wrappers import ClipAndSkipNonFinite, StepFreezing
from palm_ds.runtime.param_groups import param_groups, set_lr
from tests.helpers.tied_model import TiedModel, train


@pytest.mark.parametrize("kind", ["adamw", "lamb", "tests.helpers.own_optimizer.Lion"])
def test_freezing_a_step_equals_removing_the_gradients(kind: str) -> None:
    """The reference sets the gradients of frozen parameters to None by hand."""
    model, reference = TiedModel(), TiedModel()
    config = OptimizerConfig(kind=kind, lr=0.1, clip=0.5)  # type: ignore[arg-type]
    names = [name for name, _ in model.named_parameters()]
    frozen = {1: "heads.*", 2: "backbone.dense.*"}
    freezing = StepFreezing(frozen.values(), names)
    optimizer = build_optimizer(
        model, config, zero_stage=0, checked=True, freezable=freezing.patterns
    )
    by_hand = build_optimizer(reference, config, zero_stage=0, checked=True)
    freezing.watch(model)
    for step in range(4):
        pattern = frozen.get(step)
        set_lr(optimizer.param_groups, 0.1)
        freezing.prepare(optimizer.param_groups, [pattern] if pattern else [])
        for each in (model, reference):
            each.zero_grad()
            sum((p * (step + 1 + p)).sum() for p in each.parameters()).backward()  # type: ignore
        for name, parameter in reference.named_parameters():
            if pattern and name.startswith(pattern[:-1]):
                parameter.grad = None
        optimizer.step()
        by_hand.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            states = optimizer.state[a], by_hand.state[b]
            assert int(states[0]["step"]) == int(states[1]["step"])


def test_averages_start_as_the_weights_and_ignore_skipped_steps() -> None:
    model = TiedModel()
    optimizer = build_optimizer(model, OptimizerConfig(ema=0.75), zero_stage=0, checked=True)
    assert isinstance(optimizer, ClipAndSkipNonFinite)
    expected = [p.detach().clone() for p in model.parameters()]
    for scale in (1.0, float("inf"), 2.0):
        train(model, optimizer, [scale])
        if not optimizer.overflow:
            expected = [
                0.75 * a + 0.25 * p for a, p in zip(expected, model.parameters(), strict=True)
            ]
    for average, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(optimizer.ema_of(p), average)


def test_checked_adamw_is_clipped_adamw() -> None:
    model, reference = TiedModel(), TiedModel()
    config = OptimizerConfig(lr=0.1, clip=0.5)
    optimizer = build_optimizer(model, config, zero_stage=0, checked=True)
    assert isinstance(optimizer, ClipAndSkipNonFinite)
    train(model, optimizer, [0.001, 3.0, 1.0])
    settings = dict(lr=0.1, betas=config.betas, eps=config.eps)
    plain = torch.optim.AdamW(param_groups(reference, config.weight_decay), **settings)  # type: ignore
    for scale in [0.001, 3.0, 1.0]:
        for number, p in enumerate(reference.parameters()):
            torch.manual_seed(number)
            p.grad = torch.randn_like(p) * scale
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
    assert optimizer._global_grad_norm == pytest.approx(norm.item())
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_vanished_moments_become_0(kind: str, monkeypatch) -> None:
    """They would stay denormal forever; the weights are bit-identical."""

    def trained() -> tuple[torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"word": nn.Embedding(4, 8)})
        words: nn.Parameter = model["word"].weight  # type: ignore[assignment]
        config = OptimizerConfig(kind=kind, weight_decay=0.0)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, config, zero_stage=0, checked=True)
        for step in range(1100):
            words.grad = torch.zeros_like(words)
            words.grad[0] = 0.01  # in every step
            words.grad[1] = 0.01 * (step < 3)  # in the first three only; rows 2 and 3 never
            optimizer.step()
        return optimizer, words

    def denormal(optimizer: torch.optim.Optimizer, words: torch.Tensor) -> bool:
        mean = optimizer.state[words]["exp_avg"].abs()
        return bool(((mean > 0) & (mean < torch.finfo(torch.float32).tiny)).any())

    flushed, words = trained()
    assert not denormal(flushed, words)
    assert flushed.state[words]["exp_avg"][0].min() > 0.009
    monkeypatch.setattr(
        "palm_ds.runtime.optimizer_wrappers._flush_denormals", lambda state, spec: None
    )
    plain, other = trained()
    assert denormal(plain, other)
    assert torch.equal(words, other)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["adamw", "lamb", "tests.helpers.own_optimizer.Lion"])
def test_non_finite_gradients_change_nothing(kind: str, bad: float) -> None:
    model = TiedModel()
    config = OptimizerConfig(kind=kind, lr=0.1)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, config, zero_stage=0, checked=True)
    assert isinstance(optimizer, ClipAndSkipNonFinite)
    train(model, optimizer, [1.0])
    before = [p.detach().clone() for p in model.parameters()]
    state = str(optimizer.state_dict()["state"])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    first = next(iter(model.parameters()))
    assert first.grad is not None
    first.grad[0, 0] = bad
    optimizer.step()
    assert optimizer.overflow
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert str(optimizer.state_dict()["state"]) == state
    train(model, optimizer, [1.0])
    assert not optimizer.overflow
