"""Clipping, skipping, averaging and freezing, compared with torch's own optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.param_groups import AllBut, param_groups, set_rates
from palm_ds.runtime.optimizer.wrappers import (
    ClipAndSkipNonFinite,
    StepFreezing,
    decides_on_device,
)
from tests.helpers.simulated_zero import LayersModel, gradients
from tests.helpers.tied_model import TiedModel, train

KINDS = ["adamw", "lamb", "stable_adamw", "tests.helpers.own_optimizer.Lion"]


@pytest.mark.parametrize("kind", KINDS)
def test_freezing_a_step_equals_removing_the_gradients(kind: str) -> None:
    """The reference sets the gradients of frozen parameters to None by hand."""
    model, reference = TiedModel(), TiedModel()
    config = OptimizerConfig(kind=kind, lr=0.1, clip=0.5)  # type: ignore[arg-type]
    frozen = {1: "heads.*", 2: "backbone.dense.*"}
    freezing = StepFreezing(frozen.values(), model)
    optimizer = build_optimizer(
        model, config, zero_stage=0, checked=True, freezable=freezing.selections
    )
    by_hand = build_optimizer(reference, config, zero_stage=0, checked=True)
    freezing.watch(model)
    for step in range(4):
        pattern = frozen.get(step)
        set_rates(optimizer.param_groups, 0.1)
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


def test_what_a_step_trains_or_freezes_is_there() -> None:
    model = TiedModel()
    model.heads.requires_grad_(False)
    assert StepFreezing(["heads.*", AllBut(("backbone.dense.*",))], model)
    for each, error in {
        "head.*": "parameters to freeze: no parameter matches 'head.*'; did you mean \"heads.*\"?",
        AllBut(
            ("heads.*",)
        ): "`trains`, among the parameters that are not frozen: no parameter matches 'heads",
    }.items():
        with pytest.raises(UserError) as caught:
            StepFreezing([each], model)
        assert str(caught.value).startswith(error)


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


@pytest.mark.parametrize("kind", ["adamw", "lamb", "stable_adamw"])
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
        "palm_ds.runtime.optimizer.wrappers._flush_denormals", lambda state, spec: None
    )
    plain, other = trained()
    assert denormal(plain, other)
    assert torch.equal(words, other)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_deciding_on_the_device_changes_nothing(clip: float, monkeypatch) -> None:
    """As on a GPU: the same weights, averages and counts, without reading a number on the host."""
    scales = [0.001, 3.0, float("nan"), 1.0]
    config = OptimizerConfig(lr=0.1, clip=clip, ema=0.75)
    models = TiedModel(), TiedModel()
    found = [build_optimizer(model, config, zero_stage=0, checked=True) for model in models]
    train(models[0], found[0], scales)
    wrappers = "palm_ds.runtime.optimizer.wrappers"
    monkeypatch.setattr(f"{wrappers}.decides_on_device", lambda optimizer, norm: True)
    monkeypatch.setattr(f"{wrappers}._flush_denormals", lambda state, spec: None)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, None)
    train(models[1], found[1], scales)
    monkeypatch.undo()
    host, device = found
    assert isinstance(host, ClipAndSkipNonFinite) and isinstance(device, ClipAndSkipNonFinite)
    assert int(device.skipped) == 1 and not device.overflow
    assert float(device._global_grad_norm) == pytest.approx(host._global_grad_norm)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(host.ema_of(p), device.ema_of(q), rtol=1e-6, atol=1e-7)
        assert int(host.state[p]["step"]) == int(device.state[q]["step"]) == 3


def test_who_decides_on_the_device() -> None:
    norm = torch.zeros((), device="meta")
    for kind, expected in [("adamw", True), ("muon", False), ("torch.optim.AdamW", False)]:
        options = {"fused": True} if "." in kind else {}
        config = OptimizerConfig(kind=kind, options=options)
        model = LayersModel()
        optimizer = build_optimizer(model, config, zero_stage=0, checked=True)
        assert decides_on_device(optimizer, norm) == expected, kind
        assert not decides_on_device(optimizer, torch.zeros(()))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", ["adamw", "lamb", "stable_adamw"])
def test_a_step_on_a_gpu_equals_one_on_a_cpu_and_never_waits(kind: str) -> None:
    config = OptimizerConfig(kind=kind, lr=0.1, clip=0.5, ema=0.75, weight_decay=0.1)
    models = LayersModel(), LayersModel().cuda()
    for model in models:
        optimizer = build_optimizer(model, config, zero_stage=0, checked=True)
        for step in range(6):
            for parameter, gradient in gradients(model, step).items():
                parameter.grad = gradient.to(parameter.device) / float(step != 3)
            on_gpu = next(model.parameters()).is_cuda and step > 0  # the first one makes tables
            torch.cuda.set_sync_debug_mode("error" if on_gpu else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-5, atol=1e-6)
