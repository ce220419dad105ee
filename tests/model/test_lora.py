"""LoRA's settings, its layers and its merged weights."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import ROLES, build_encoder
from palm_ds.model.encoder.transformer import TransformerEncoder
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.lora import LoraSettings, add_lora, lora_modules, merged, merged_parts
from palm_ds.model.multi_task_model import Model

SIZE, INNER = 16, 40
ALL = LoraSettings(rank=3, alpha=6, targets="all")


def small_model(*, pooled: bool = True, recompute: bool = False) -> Model:
    torch.manual_seed(3)
    config = EncoderConfig(
        vocab_size=30,
        hidden_size=SIZE,
        num_layers=2,
        num_heads=2,
        intermediate_size=INNER,
        max_positions=24,
        dropout=0.0,
        attention_dropout=0.0,
    )
    backbone = build_encoder(config, Kernels(dropout="counter"), recompute=recompute)
    return Model(backbone, {"topic": ClassHead(SIZE, 3, pooled=pooled)}, {"topic": "topic"})


def text(size: int, label: int) -> Example:
    return Example(
        input_ids=np.arange(size) + 5,
        token_type_ids=np.zeros(size, np.int64),
        source_offsets=np.arange(size),
        annotations={},
        labels={"topic": (np.array([0]), np.array([label]))},
    )


def batch(rows: slice = slice(None)) -> Batch:
    packed = [[(text(5, 0), 0), (text(9, 1), 1)], [(text(12, 2), 2)]]
    found = collate(packed[rows], length=16, pad=0)
    return replace(found, dropout_key=5, first_row=rows.start or 0)


def adapted(settings: LoraSettings = ALL, **how: Any) -> Model:
    """A model whose B are not 0."""
    model = small_model(**how)
    add_lora(model, settings, seed=1)
    torch.manual_seed(8)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=1.0)
        if ".lora_magnitude_vector." in name:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


def test_the_outputs_stay_and_the_encoder_is_frozen() -> None:
    plain, model = small_model(), small_model()
    add_lora(model, LoraSettings(rank=3), seed=1)
    torch.testing.assert_close(model.logits(batch(), "topic"), plain.logits(batch(), "topic"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {
        "backbone.pooler.dense.weight",
        "backbone.pooler.dense.bias",
        "heads.topic.out.weight",
        "heads.topic.out.bias",
    }
    assert sum(".lora_A." in name for name in trained) == 2 * 2
    assert not [n for n in trained if "key" in n or "project" in n]


def test_a_pooler_that_no_head_reads_is_frozen_too() -> None:
    model = small_model(pooled=False)
    add_lora(model, ALL, seed=1)
    assert not model.backbone.pooler.dense.weight.requires_grad


def test_the_seed_alone_decides_the_first_a() -> None:
    models = [small_model() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        torch.manual_seed(seed * 77)
        add_lora(model, ALL, seed=seed)
    name = "backbone.layers.1.qkv.value.lora_A.default.weight"
    first, again, other = (model.get_parameter(name) for model in models)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("change", ({}, {"rank_stabilized": True}, {"dora": True}), ids=repr)
def test_the_merged_model_computes_the_same(change: dict[str, bool]) -> None:
    import peft

    settings = replace(ALL, **change)
    model, plain = adapted(settings), small_model()
    found = merged(dict(sorted(model.state_dict().items())), settings)
    assert found.keys() == plain.state_dict().keys()
    before = plain.logits(batch(), "topic")
    plain.load_state_dict(found)
    after = plain.logits(batch(), "topic")
    torch.testing.assert_close(after, model.logits(batch(), "topic"), atol=1e-5, rtol=1e-5)
    assert (after - before).abs().max() > 1e-3
    linear = copy.deepcopy(model.backbone.layers[0].contract)
    assert isinstance(linear, peft.tuners.lora.Linear)
    linear.merge()
    weight = found["backbone.layers.0.contract.weight"]
    torch.testing.assert_close(weight, linear.base_layer.weight.data, atol=1e-6, rtol=1e-6)


def test_without_lora_nothing_is_merged() -> None:
    state = small_model().state_dict()
    assert merged(state, None) is state
    assert {name: [part.base for part in parts] for name, parts in merged_parts(state).items()} == {
        name: [name] for name in state
    }


def gradients(model: Model, *batches: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for each in batches:
        model(each)["topic"].loss_sum.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_dropout_depends_on_the_place_of_a_token_alone() -> None:
    """Neither on the split into micro-batches, nor on torch's generator, nor on recomputation."""
    settings = replace(ALL, dropout=0.3)
    model, recomputing = adapted(settings), adapted(settings, recompute=True)
    torch.manual_seed(1)
    whole = gradients(model, batch())
    torch.manual_seed(2)
    parts = gradients(model, batch(slice(0, 1)), batch(slice(1, 2)))
    again = gradients(recomputing, batch())
    still = gradients(adapted(), batch())
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
    name = "backbone.layers.0.contract.lora_A.default.weight"
    assert not torch.allclose(still[name], whole[name])
    other = gradients(model, replace(batch(), dropout_key=6))
    assert not torch.allclose(other[name], whole[name])


def test_each_matrix_has_its_own_masks_at_its_rate() -> None:
    model = adapted(replace(ALL, dropout=0.25)).train()
    layer, seen = model.backbone.layers[0], {}
    modules = lora_modules(TransformerEncoder.matrices(model.backbone.config))
    for name, module in modules.items():
        dropped = layer.get_submodule(f"{module}.lora_dropout.default")
        dropped.register_forward_hook(lambda _m, x, y, name=name: seen.update({name: y / x[0]}))
    model(batch())
    assert list(seen) == list(ROLES)
    for name, ratio in seen.items():
        kept = ratio[~ratio.isnan()]
        assert set((3 * kept).round(decimals=3).unique().tolist()) <= {0.0, 4.0}, name
        assert abs((kept == 0).float().mean() - 0.25) < 0.08, name
    assert not torch.equal(seen["query"] == 0, seen["value"] == 0)


@pytest.mark.parametrize(
    ("values", "error"),
    (
        ({"rank": 0}, "lora.rank: expected a number above 0, got 0"),
        ({"alpha": -1}, "lora.alpha: expected a number above 0, got -1"),
        ({"dropout": 1}, "lora.dropout: expected a number below 1, got 1"),
        ({"targets": []}, "lora.targets: empty; name some of query, key"),
        ({"targets": ["querry"]}, "lora.targets: no 'querry'; did you mean 'query'?"),
        ({"targets": "al"}, "lora.targets: no 'al'; did you mean 'all'?"),
        ({"use_dora": True}, "use_dora"),
    ),
)
def test_wrong_settings(values: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(LoraSettings, values, "lora")
    assert error in str(caught.value).replace('"', "'")


def test_without_peft_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"lora: needs peft: pip install 'palm_ds\[lora\]'"):
        add_lora(small_model(), ALL, seed=1)
