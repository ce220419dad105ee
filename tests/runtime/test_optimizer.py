from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.runtime.optimizer import (
    ClipAndSkipNonFinite,
    OptimizerConfig,
    StepFreezing,
    build_optimizer,
    freeze,
    match_patterns,
    param_lr_scales,
    set_lr,
)
from palm_ds.runtime.optimizer import param_groups as groups_of


class Tied(nn.Module):
    """The names of a real model: a word table that the masked-word head shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.ModuleDict(
            {"word": nn.Embedding(10, 4), "dense": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
        )
        head = nn.ModuleDict({"dense": nn.Linear(4, 4)})
        head.register_parameter("words", self.backbone["word"].weight)  # type: ignore[arg-type]
        self.heads = nn.ModuleDict({"words": head, "order": nn.Linear(4, 3)})


def test_what_decays() -> None:
    model = Tied()
    decayed, kept = groups_of(model, 0.01)
    names = {id(p): n for n, p in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == [
        "backbone.word.weight",
        "backbone.dense.weight",
    ]
    assert {names[id(p)] for p in kept["params"]} == set(names.values()) - {
        "backbone.word.weight",
        "backbone.dense.weight",
    }
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.01, 0.0)


def test_real_model_groups_cover_everything_once() -> None:
    from palm_ds.model.encoder import Encoder, EncoderConfig
    from palm_ds.model.heads import ClassHead, MaskedLMHead
    from palm_ds.model.multi_task_model import Model

    backbone = Encoder(
        EncoderConfig(vocab_size=50, hidden_size=8, num_layers=1, num_heads=2, max_positions=8)
    )
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(8, 3)}
    model = Model(backbone, heads, {name: name for name in heads})
    decayed, kept = groups_of(model, 0.01)
    together = [id(p) for p in [*decayed["params"], *kept["params"]]]
    assert sorted(together) == sorted(id(p) for p in model.parameters())
    assert id(backbone.word.weight) in {id(p) for p in decayed["params"]}
    assert all(p.ndim >= 2 for p in decayed["params"])


NAMES = [
    "backbone.word.weight",
    "backbone.norm.bias",
    *(f"backbone.layers.{i}.qkv.weight" for i in range(12)),
    "backbone.pooler.dense.weight",
    "heads.tags.out.weight",
    "heads.tags.crf.moves",
]


def test_layers_are_numbered_as_in_ernie() -> None:
    """ERNIE: decay ** (layers - i) for layer i from 0, decay ** (layers + 1) for embeddings."""
    factors = param_lr_scales(NAMES, 0.8)
    wanted = {f"backbone.layers.{i}.qkv.weight": 0.8 ** (12 - i) for i in range(12)}
    wanted |= dict.fromkeys(NAMES[:2], 0.8**13) | dict.fromkeys(NAMES[-3:], 1.0)
    assert factors == pytest.approx(wanted)
    assert set(param_lr_scales(NAMES, 1.0).values()) == {1.0}


def test_a_factor_of_its_own_stands_above_the_layers() -> None:
    given = {"heads.tags.*": 4.0, "heads.tags.crf.*": 50.0, "backbone.layers.11.*": 1.5}
    factors = param_lr_scales(NAMES, 0.5, given)
    assert [factors[name] for name in NAMES[-4:]] == [1.5, 1.0, 4.0, 50.0]
    assert factors["backbone.layers.10.qkv.weight"] == 0.25


def test_layer_decay_without_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer.layer_decay: .* backbone.layers.0"):
        param_lr_scales(["backbone.word.weight", "heads.out.weight"], 0.9)


def test_each_factor_has_its_groups() -> None:
    model = Tied()
    names = {id(p): n for n, p in model.named_parameters()}
    factors = param_lr_scales(list(names.values()), 1.0, {"heads.order.*": 3.0, "*.dense.*": 0.5})
    groups = groups_of(model, 0.01, lr_scales=factors)
    found = [
        (g["lr_scale"], g["weight_decay"], {names[id(p)] for p in g["params"]}) for g in groups
    ]
    assert sorted(found, key=str) == sorted(
        [
            (1.0, 0.01, {"backbone.word.weight"}),
            (0.5, 0.01, {"backbone.dense.weight"}),
            (1.0, 0.0, {"backbone.norm.weight", "backbone.norm.bias"}),
            (3.0, 0.0, {"heads.order.weight", "heads.order.bias"}),
            (
                0.5,
                0.0,
                {"backbone.dense.bias", "heads.words.dense.weight", "heads.words.dense.bias"},
            ),
        ],
        key=str,
    )


def test_what_is_frozen_is_in_no_group() -> None:
    model = Tied()
    freeze(model, ("backbone.*",))
    assert not model.backbone["word"].weight.requires_grad  # nor for the head that shares it
    grouped = {id(p) for group in groups_of(model, 0.01) for p in group["params"]}
    assert grouped == {id(p) for n, p in model.named_parameters() if n.startswith("heads.")}


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (("backbone.wrod.weight",), "called 'backbone.wrod.weight'; .*\"backbone.word.weight\""),
        (("backbone.word",), 'did you mean "backbone.word.*"'),
        (("backbone.norm.*", "head.*"), 'did you mean "heads.*"'),
        (("encoder.embedding_7",), r"known: backbone.\*, backbone.dense.\*, .*heads.words.\*"),
        (("backbone.*", "heads.*"), r"\['backbone.\*', 'heads.\*'\] freezes every parameter"),
    ],
)
def test_patterns_that_cannot_be_meant(patterns: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(UserError, match=f"^optimizer.freeze: .*{wanted}"):
        freeze(Tied(), patterns)


def test_patterns_know_case_and_dots() -> None:
    assert match_patterns(["backbone.layers.1*"], NAMES, "x") == {
        f"backbone.layers.{i}.qkv.weight" for i in (1, 10, 11)
    }
    with pytest.raises(UserError, match="^x: no parameter is called 'Heads"):
        match_patterns(["Heads.*"], NAMES, "x")


@pytest.mark.parametrize("kind", ["adamw", "lamb", "tests.helpers.own_optimizer.Lion"])
def test_what_rests_is_as_if_it_were_no_parameter(kind: str) -> None:
    """The same gradients with the resting ones taken away by hand, in torch's way."""
    ours, theirs = Tied(), Tied()
    config = OptimizerConfig(kind=kind, lr=0.1, clip=0.5)  # type: ignore[arg-type]
    names = [name for name, _ in ours.named_parameters()]
    rests = {1: "heads.*", 2: "backbone.dense.*"}
    resting = StepFreezing(rests.values(), names)
    mine = build_optimizer(ours, config, zero_stage=0, checked=True, freezable=resting.patterns)
    by_hand = build_optimizer(theirs, config, zero_stage=0, checked=True)
    resting.watch(ours)
    for step in range(4):
        pattern = rests.get(step)
        set_lr(mine.param_groups, 0.1)
        resting.prepare(mine.param_groups, [pattern] if pattern else [])
        for model in (ours, theirs):
            model.zero_grad()
            sum((p * (step + 1 + p)).sum() for p in model.parameters()).backward()  # type: ignore
        for name, parameter in theirs.named_parameters():
            if pattern and name.startswith(pattern[:-1]):
                parameter.grad = None
        mine.step()
        by_hand.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            states = mine.state[a], by_hand.state[b]
            assert int(states[0]["step"]) == int(states[1]["step"])


def test_averages_begin_as_the_first_weights_and_skip_what_is_skipped() -> None:
    model = Tied()
    optimizer = build_optimizer(model, OptimizerConfig(ema=0.75), zero_stage=0, checked=True)
    assert isinstance(optimizer, ClipAndSkipNonFinite)
    wanted = [p.detach().clone() for p in model.parameters()]
    for scale in (1.0, float("inf"), 2.0):
        train(model, optimizer, [scale])
        if not optimizer.overflow:
            wanted = [0.75 * a + 0.25 * p for a, p in zip(wanted, model.parameters(), strict=True)]
    for average, p in zip(wanted, model.parameters(), strict=True):
        torch.testing.assert_close(optimizer.ema_of(p), average)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[float]) -> None:
    for scale in gradients:
        for number, p in enumerate(model.parameters()):
            torch.manual_seed(number)
            p.grad = torch.randn_like(p) * scale
        optimizer.step()


def test_checked_adamw_is_clipped_adamw() -> None:
    ours, theirs = Tied(), Tied()
    config = OptimizerConfig(lr=0.1, clip=0.5)
    optimizer = build_optimizer(ours, config, zero_stage=0, checked=True)
    assert isinstance(optimizer, ClipAndSkipNonFinite)
    train(ours, optimizer, [0.001, 3.0, 1.0])
    settings = dict(lr=0.1, betas=config.betas, eps=config.eps)
    plain = torch.optim.AdamW(groups_of(theirs, config.weight_decay), **settings)  # type: ignore
    for scale in [0.001, 3.0, 1.0]:
        for number, p in enumerate(theirs.parameters()):
            torch.manual_seed(number)
            p.grad = torch.randn_like(p) * scale
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        plain.step()
    assert optimizer._global_grad_norm == pytest.approx(norm.item())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_moments_of_what_is_read_no_more_end_at_0(kind: str, monkeypatch) -> None:
    """They would stay denormal for ever; the weights are the same to the last bit."""

    def trained() -> tuple[torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"word": nn.Embedding(4, 8)})
        words: nn.Parameter = model["word"].weight  # type: ignore[assignment]
        config = OptimizerConfig(kind=kind, weight_decay=0.0)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, config, zero_stage=0, checked=True)
        for step in range(1100):
            words.grad = torch.zeros_like(words)
            words.grad[0] = 0.01  # of every step
            words.grad[1] = 0.01 * (step < 3)  # of the first ones alone; 2 and 3 of none
            optimizer.step()
        return optimizer, words

    def denormal(optimizer: torch.optim.Optimizer, words: torch.Tensor) -> bool:
        mean = optimizer.state[words]["exp_avg"].abs()
        return bool(((mean > 0) & (mean < torch.finfo(torch.float32).tiny)).any())

    settled, words = trained()
    assert not denormal(settled, words)
    assert settled.state[words]["exp_avg"][0].min() > 0.009
    monkeypatch.setattr("palm_ds.runtime.optimizer._flush_denormals", lambda state, kept: None)
    plain, other = trained()
    assert denormal(plain, other)
    assert torch.equal(words, other)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["adamw", "lamb", "tests.helpers.own_optimizer.Lion"])
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str, bad: float) -> None:
    model = Tied()
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


def test_lamb_under_zero_is_refused() -> None:
    with pytest.raises(UserError, match="optimizer.kind: lamb .* ZeRO 2 .*stage 0, or adamw"):
        build_optimizer(Tied(), OptimizerConfig(kind="lamb"), zero_stage=2, checked=False)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"kind": "adam"}, 'optimizer.kind: no "adam"; did you mean "adamw"\\? \\(or module.Class'),
        (
            {"options": {"a": 1}},
            "optimizer.options: are a module.Class's; adamw has `betas`, `eps`",
        ),
        ({"kind": "a.B", "eps": 1.0}, "optimizer.eps: a.B has it under `options`, if at all"),
        ({"lr": 0.0}, "optimizer.lr: must be above 0, got 0.0"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas: each must be in \[0, 1\), got \[0.9, 1.0\]"),
        ({"clip": -1.0}, "optimizer.clip: must not be negative"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay: must not be negative"),
        ({"fgm": -0.1}, "optimizer.fgm: must not be negative"),
        ({"layer_decay": 0.0}, r"optimizer.layer_decay: must be in \(0, 1\], got 0.0"),
        ({"layer_decay": 1.1}, r"optimizer.layer_decay: must be in \(0, 1\], got 1.1"),
        ({"ema": 1.0}, r"optimizer.ema: must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_numbers(values: dict[str, object], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        OptimizerConfig(**values)  # type: ignore[arg-type]
