"""Layers of a larger encoder start a smaller one; what does not fit is an error or a note."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.weights.formats.weights_info import WeightsInfo
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import load_weights, save_weights
from tests.helpers.small_configs import SMALL
from tests.helpers.word_encoders import config as word_config

LARGE = replace(SMALL, num_layers=5)
HEADS = {"words": "words", "kind": "kind"}


def model(config: EncoderConfig, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    backbone = build_encoder(config)
    heads = {"words": MaskedLMHead(backbone), "kind": ClassHead(config.hidden_size, 3, pooled=True)}
    return Model(backbone, heads, HEADS)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder, net = tmp_path_factory.mktemp("large") / "weights", model(LARGE)
    save_weights(net, folder, WeightsInfo(backbone=LARGE, head_of=HEADS))
    return folder, net.state_dict()


def test_the_chosen_layers_are_taken(large) -> None:
    folder, source = large
    small = model(replace(LARGE, num_layers=3), seed=2)
    report = load_weights(open_model(folder), small, layers=[0, 4, 2])
    assert not report.newly_initialized and not report.unused
    assert "weights: layers 0, 4, 2 of 5" in report.lines()
    for name, tensor in small.state_dict().items():
        for number, chosen in enumerate([0, 4, 2]):
            if name.startswith(f"backbone.layers.{number}."):
                name = name.replace(f"layers.{number}", f"layers.{chosen}")
                break
        assert torch.equal(tensor, source[name]), name


def test_tables_of_other_sizes_and_another_vocabulary(large) -> None:
    """As ERNIE tiny from ERNIE 2.0: more positions, fewer token types, no tasks, other words."""
    folder, source = large
    sizes: dict[str, Any] = dict(max_positions=25, token_types=2, task_types=0, vocab_size=50)
    small = model(replace(LARGE, num_layers=1, **sizes), seed=2)
    before = {name: x.clone() for name, x in small.state_dict().items()}
    report = load_weights(open_model(folder), small, layers=[3])
    after = small.state_dict()
    position, segment = (after[f"backbone.{name}.weight"] for name in ("position", "segment"))
    assert torch.equal(position[:20], source["backbone.position.weight"])
    assert torch.equal(position[20:], before["backbone.position.weight"][20:])
    assert torch.equal(segment, source["backbone.segment.weight"][:2])
    new = {name for name in before if torch.equal(before[name], after[name]) and before[name].any()}
    assert {x for x in new if after[x].std() > 0} == {
        "backbone.word.weight",
        "heads.words.dense.weight",
    }
    said = str(report)
    assert "positions: 20 of 25 rows" in said and "token types: 2 of 2 rows" in said
    assert "words: another vocabulary (32 tokens), newly initialized" in said
    assert "task embedding: 3 rows, not taken" in said


def test_no_layers_are_the_embeddings_alone(large) -> None:
    folder, source = large
    small = model(replace(LARGE, num_layers=2), seed=2)
    report = load_weights(open_model(folder), small, layers=[])
    assert all(".layers." in name for name in report.newly_initialized)
    assert torch.equal(small.state_dict()["backbone.norm.weight"], source["backbone.norm.weight"])


def test_a_bag_of_words_takes_the_words(large) -> None:
    folder, source = large
    numbers = word_config("bag_of_words", vocab_size=32, hidden_size=6, embedding_size=16)
    small = model(numbers, seed=2)
    report = load_weights(open_model(folder), small, layers=[])
    assert report.loaded == ("backbone.word.weight",)
    assert torch.equal(small.backbone.word.weight, source["backbone.word.weight"])
    with pytest.raises(UserError, match="is bert, but this model is bag_of_words; `init_layers: "):
        load_weights(open_model(folder), small)
    with pytest.raises(UserError, match="a transformer's layers do not fit bag_of_words"):
        load_weights(open_model(folder), small, layers=[1])
    narrow = model(word_config("bag_of_words", vocab_size=32), seed=2)
    assert load_weights(open_model(folder), narrow, layers=[]).loaded
    wide = model(word_config("cnn", vocab_size=32, embedding_size=8))
    with pytest.raises(UserError, match=r"\(32, 16\), those of this encoder \(32, 8\); backbone"):
        load_weights(open_model(folder), wide, layers=[])


@pytest.mark.parametrize(
    ("change", "layers", "expected"),
    [
        (
            {"hidden_size": 8},
            [0, 1],
            "has hidden_size 16, this encoder has 8; weights are",
        ),
        ({}, [0, 5], "no layer 5; .* has layers 0 to 4"),
        ({}, [0, -1], "no layer -1"),
        ({}, [0], "1 layers, but backbone.num_layers is 2; give one for each, or none"),
        ({"activation": "relu"}, [0, 1], "has backbone.activation 'gelu', but this model has"),
        ({"intermediate_size": 20}, [0, 1], "has backbone.intermediate_size 24"),
    ],
)
def test_what_does_not_fit(large, change: dict[str, Any], layers: list[int], expected: str) -> None:
    folder, _ = large
    with pytest.raises(UserError, match=expected):
        load_weights(
            open_model(folder), model(replace(LARGE, num_layers=2, **change)), layers=layers
        )


def test_a_recipe_gets_the_encoder_with_as_many_layers(large) -> None:
    values: dict[str, Any] = {
        "init_from": str(large[0]),
        "length": 16,
        "batch": "2 examples",
        "sources": {"a": {"table": "a.tsv"}},
        "tasks": {"x": {"kind": "classification", "source": "a"}},
        "stages": [{"x": 2}],
    }
    assert make_recipe({**values, "init_layers": [0, 2]}).backbone_config.num_layers == 2
    chosen = make_recipe({**values, "init_layers": [], "backbone": {"num_layers": 4}})
    assert chosen.backbone_config == replace(LARGE, num_layers=4)
    bag = make_recipe({**values, "init_layers": [], "backbone": {"kind": "bag_of_words"}})
    assert bag.backbone_config.hidden_size == 128
    assert make_recipe(chosen.resolved()).init_layers == []
    with pytest.raises(UserError, match="init_layers: needs `init_from`"):
        make_recipe({**values, "init_from": "", "init_layers": [0]})
