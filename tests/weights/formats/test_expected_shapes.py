"""A checkpoint's tensors are compared with the shapes of the model itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.weights.formats.contents import CheckpointContents, HeadInfo, TensorEntry
from palm_ds.weights.formats.expected_shapes import checked, expected_shapes

CONFIG = EncoderConfig(
    vocab_size=11, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=12, max_positions=10
)
HEADS = {
    "words": HeadInfo(kind="masked_words"),
    "order": HeadInfo(kind="classes", classes=3),
    "tags": HeadInfo(kind="classes", classes=4, pooled=False, transitions=True),
}


def test_shapes_are_those_of_a_model_with_values() -> None:
    backbone = build_encoder(CONFIG)
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(8, 3), "tags": CRFHead(8, 4)}
    model = torch.nn.ModuleDict({"backbone": backbone, "heads": torch.nn.ModuleDict(heads)})
    real = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert expected_shapes(CONFIG, HEADS) == real


def test_only_heads_of_a_custom_encoder_are_known() -> None:
    shapes = expected_shapes(replace(CONFIG, kind="mine.Encoder"), HEADS)
    assert {name.split(".")[1] for name in shapes} == set(HEADS)


def test_random_numbers_are_not_used() -> None:
    before = torch.get_rng_state()
    expected_shapes(CONFIG, HEADS)
    assert torch.equal(before, torch.get_rng_state())


def test_impossible_sizes_are_one_line() -> None:
    config = replace(CONFIG, vocab_size=10**15, hidden_size=10**9)
    entry = TensorEntry(source_names=("w",), shape=(1, 1), read=lambda: torch.zeros(1, 1))
    entries = {f"backbone.{number}": entry for number in range(9)}
    contents = CheckpointContents(
        path=Path("some/model"), format="", config=config, entries=entries
    )
    with pytest.raises(UserError, match="some/model: no encoder can have the sizes") as raised:
        checked(contents)
    assert "\n" not in str(raised.value)
