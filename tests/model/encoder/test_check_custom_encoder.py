"""The check of custom encoders, and saving, loading and converting their weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.check_custom_encoder import check_custom_encoder
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.kinds.bert import Bert
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.multi_task_model import Model
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.weights import weights_folder
from palm_ds.weights.convert.convert import convert
from palm_ds.weights.formats.weights_info import INFO, WeightsInfo, read_info
from palm_ds.weights.model_folder import open_model

OWN = "tests.helpers.own_encoder.PreNorm"
SIZE: dict[str, Any] = dict(
    hidden_size=16, num_layers=2, num_heads=2, max_positions=20, token_types=2, task_types=3
)


def config(kind: str = OWN, **options: Any) -> EncoderConfig:
    return EncoderConfig(vocab_size=30, kind=kind, options=options, **SIZE)


def model_of(numbers: EncoderConfig, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    backbone = build_encoder(numbers)
    return Model(backbone, {"x": ClassHead(16, 2, pooled=True)}, {"x": "x"})


def saved(folder: Path, model: Model) -> Path:
    numbers = model.backbone.config
    weights_folder.save_weights(model, folder, WeightsInfo(backbone=numbers, head_of={"x": "x"}))
    return folder


@pytest.mark.parametrize("numbers", [config("bert"), config(), config(scale=0.5)])
def test_valid_encoders_pass(numbers: EncoderConfig) -> None:
    check_custom_encoder(numbers)
    check_custom_encoder(
        replace(numbers, vocab_size=None, position_offset=2, pad=1, max_positions=8)
    )


def test_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model = model_of(config(scale=0.5))
    folder = saved(tmp_path / "weights", model)
    assert read_info(folder / INFO).backbone == config(scale=0.5)
    other = model_of(read_info(folder / INFO).backbone, seed=1)
    loaded = weights_folder.load_weights(open_model(folder), other)
    assert not loaded.newly_initialized and not loaded.unused
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    with pytest.raises(UserError, match="has backbone.options {'scale': 0.5}, but this model"):
        weights_folder.load_weights(open_model(folder), model_of(config()))
    with pytest.raises(UserError, match=f"has backbone.kind '{OWN}', but this model has 'bert'"):
        weights_folder.load_weights(open_model(folder), model_of(config("bert")))


def test_built_in_weights_load_if_they_fit(tmp_path: Path) -> None:
    folder = saved(tmp_path / "weights", model_of(config("bert")))
    values = {"init_from": str(folder), "backbone": {"kind": OWN, "options": {"scale": 2.0}}}
    with pytest.raises(UserError, match="batch: missing"):  # the encoder is complete before
        make_recipe(values)
    model = model_of(config(scale=2.0), seed=1)
    loaded = weights_folder.load_weights(open_model(folder), model)
    assert loaded.newly_initialized == (
        "backbone.wide",
        "backbone.last.weight",
        "backbone.last.bias",
    )
    assert "newly initialized: backbone.wide" in str(loaded) and not loaded.unused
    small = model_of(replace(config(), max_positions=12))
    with pytest.raises(UserError, match=r"position.weight has shape \(20, 16\), but \(12, 16\) in"):
        weights_folder.load_weights(open_model(folder), small)
    with pytest.raises(UserError, match="has backbone.layer_norm_eps"):
        weights_folder.load_weights(
            open_model(folder), model_of(replace(config(), layer_norm_eps=1e-3))
        )


def test_other_formats_refuse_a_custom_encoder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "weights", model_of(config()))
    for to in ("huggingface", "paddle"):
        with pytest.raises(UserError, match=f"{to} has no {OWN} encoder; convert to palm_ds"):
            convert(folder, tmp_path / "out", to)
    with pytest.raises(UserError, match=f"Hugging Face has no {OWN} encoder"):
        weights_folder.export_hf(model_of(config()), tmp_path / "hf", config=config())
    assert not (tmp_path / "hf").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["cnn", "bilstm"])
def test_tasks_that_hide_tokens_need_attention_that_follows(kind: str) -> None:
    check_custom_encoder(config("tests.helpers.own_encoder.PreNorm"), ["titles"])
    with pytest.raises(UserError, match="see others that tasks.titles hides from them"):
        check_custom_encoder(config("tests.helpers.own_encoder.SeesAll"), ["titles"])
    with pytest.raises(UserError, match=f"{kind} reads whole texts; tasks whose tokens see only"):
        own = EncoderConfig(kind=kind, hidden_size=16, num_heads=2, num_layers=1, task_types=0)
        check_custom_encoder(own, ["titles"])


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("Nothing", {}, "has no 'Nothing'"),
        ("PreNorm", {"scael": 1}, 'options.scael: unknown key; did you mean "scale"'),
        ("Silent", {}, "does not define activations, flops; a subclass of palm.Transformer"),
        ("PreNorm", {"config": 1}, "options.config: not an option"),
        ("Idle", {}, r"spare.weight is not used in the forward pass \(2 unused parameters\)"),
        ("Mean", {}, "depend on the other texts in its row"),
        ("Deaf", {}, r"must return \(positions, hidden\)"),
        ("Narrow", {}, r"returns the shape \(2, 12, 3\) for \(2, 12\) tokens, not \(2, 12, 16\)"),
        ("Endless", {}, "returns NaN or infinity"),
        ("Failing", {}, "fails in a trial: KeyError: 'first"),
    ],
)
def test_violations_are_one_line_errors(kind, options, expected) -> None:
    with pytest.raises(UserError, match=f"^backbone.*{expected}") as error:
        check_custom_encoder(config(f"tests.helpers.own_encoder.{kind}", **options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kind": "berd"}, 'backbone: kind: no encoder "berd"; did you mean "bert"'),
    ],
)
def test_wrong_keys(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        EncoderConfig.from_dict(values)


def test_the_built_in_encoder_is_the_default() -> None:
    assert type(build_encoder(config("bert"))) is Bert
