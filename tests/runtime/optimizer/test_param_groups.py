"""Parameter groups, learning rate scales and patterns over names."""

from __future__ import annotations

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.optimizer.param_groups import (
    freeze,
    match_patterns,
    param_groups,
    param_lr_scales,
)
from tests.helpers.tied_model import TiedModel


def test_backbone_matrices_decay() -> None:
    model = TiedModel()
    decayed, kept = param_groups(model, 0.01)
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
    from palm_ds.model.config.config import EncoderConfig
    from palm_ds.model.encoder.encoder import build_encoder
    from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
    from palm_ds.model.multi_task_model import Model

    backbone = build_encoder(
        EncoderConfig(vocab_size=50, hidden_size=8, num_layers=1, num_heads=2, max_positions=8)
    )
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(8, 3)}
    model = Model(backbone, heads, {name: name for name in heads})
    decayed, kept = param_groups(model, 0.01)
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
    scales = param_lr_scales(NAMES, 0.8)
    expected = {f"backbone.layers.{i}.qkv.weight": 0.8 ** (12 - i) for i in range(12)}
    expected |= dict.fromkeys(NAMES[:2], 0.8**13) | dict.fromkeys(NAMES[-3:], 1.0)
    assert scales == pytest.approx(expected)
    assert set(param_lr_scales(NAMES, 1.0).values()) == {1.0}


def test_scales_override_layer_decay() -> None:
    given = {"heads.tags.*": 4.0, "heads.tags.crf.*": 50.0, "backbone.layers.11.*": 1.5}
    scales = param_lr_scales(NAMES, 0.5, given)
    assert [scales[name] for name in NAMES[-4:]] == [1.5, 1.0, 4.0, 50.0]
    assert scales["backbone.layers.10.qkv.weight"] == 0.25


def test_layer_decay_without_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer.layer_decay: .* backbone.layers.0"):
        param_lr_scales(["backbone.word.weight", "heads.out.weight"], 0.9)


def test_each_scale_has_its_own_groups() -> None:
    model = TiedModel()
    names = {id(p): n for n, p in model.named_parameters()}
    scales = param_lr_scales(list(names.values()), 1.0, {"heads.order.*": 3.0, "*.dense.*": 0.5})
    groups = param_groups(model, 0.01, lr_scales=scales)
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


def test_frozen_parameters_are_in_no_group() -> None:
    model = TiedModel()
    freeze(model, ("backbone.*",))
    assert not model.backbone["word"].weight.requires_grad  # nor in the head that shares it
    grouped = {id(p) for group in param_groups(model, 0.01) for p in group["params"]}
    assert grouped == {id(p) for n, p in model.named_parameters() if n.startswith("heads.")}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("backbone.wrod.weight",), "matches 'backbone.wrod.weight'; .*\"backbone.word.weight\""),
        (("backbone.word",), 'did you mean "backbone.word.*"'),
        (("backbone.norm.*", "head.*"), 'did you mean "heads.*"'),
        (("encoder.embedding_7",), r"known: backbone.\*, backbone.dense.\*, .*heads.words.\*"),
        (("backbone.*", "heads.*"), r"\['backbone.\*', 'heads.\*'\] freezes every parameter"),
    ],
)
def test_patterns_without_a_match_are_errors(patterns: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError, match=f"^optimizer.freeze: .*{expected}"):
        freeze(TiedModel(), patterns)


def test_patterns_are_case_sensitive() -> None:
    assert match_patterns(["backbone.layers.1*"], NAMES, "x") == {
        f"backbone.layers.{i}.qkv.weight" for i in (1, 10, 11)
    }
    with pytest.raises(UserError, match="^x: no parameter matches 'Heads"):
        match_patterns(["Heads.*"], NAMES, "x")
