"""A head with a CRF survives weights folders; Hugging Face gets its linear layer, and the report
names the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.convert import convert
from palm_ds.weights.convert.convert import ConversionOptions
from palm_ds.weights.formats.contents import HeadInfo
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import WeightsInfo, load_weights, save_weights, token_heads_of
from tests.helpers.small_configs import SMALL, letters

CONFIG = replace(SMALL, num_layers=1, task_types=0)
WORDS = letters("t")


def model(seed: int, allowed: torch.Tensor | None = None) -> Model:
    torch.manual_seed(seed)
    net = Model(
        build_encoder(CONFIG),
        {"tags": CRFHead(CONFIG.hidden_size, 5, allowed=allowed)},
        {"tags": "tags"},
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


@pytest.fixture
def source(tmp_path: Path) -> Path:
    net = model(1)
    info = WeightsInfo(backbone=CONFIG, head_of={"tags": "tags"}, token_heads=token_heads_of(net))
    save_weights(net, tmp_path / "source", info, tokenizer=WORDS)
    return tmp_path / "source"


def test_a_weights_folder_has_everything(source: Path, tmp_path: Path) -> None:
    contents = open_checkpoint(source)
    assert contents.heads == {
        "tags": HeadInfo(kind="classes", classes=5, pooled=False, transitions=True)
    }
    out = convert.convert(source, tmp_path / "again", "palm_ds", ConversionOptions(strict=True))
    assert out.report.lost == {}
    net = model(2, allowed=torch.ones(7, 5, dtype=torch.bool))
    loaded = load_weights(open_model(tmp_path / "again"), net)
    assert not loaded.newly_initialized and not loaded.unused
    expected = model(1).state_dict()
    assert {name: torch.equal(x, expected[name]) for name, x in net.state_dict().items()} == (
        dict.fromkeys(expected, True)
    )


@pytest.mark.parametrize("to", ["huggingface", "paddle"])
def test_other_formats_skip_the_transitions_and_report_them(
    to: str, source: Path, tmp_path: Path
) -> None:
    out = convert.convert(source, tmp_path / "there", to, ConversionOptions(head="tags"))
    assert out.report.lost["heads.tags.crf.transitions"] == (
        "the transitions of a CRF, which BertForTokenClassification does not have"
    )
    assert out.parity
    assert "head tags" in {each.name for each in out.parity.differences}
    if to == "huggingface":
        theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "there")
        mine = model(1).state_dict()["heads.tags.out.weight"]
        assert torch.equal(theirs.classifier.weight, mine)
    with pytest.raises(UserError, match=r"strict: .*would be skipped"):
        convert.convert(
            source, tmp_path / "strict", to, ConversionOptions(head="tags", strict=True)
        )


def test_transitions_of_the_wrong_size_are_an_error(source: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(source / "weights.safetensors")
    state["heads.tags.crf.transitions"] = torch.zeros(6, 5)
    save_file(state, source / "weights.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError,
        match=r"crf.transitions has shape \(6, 5\), but the configuration expects \(7, 5\)",
    ):
        open_checkpoint(source)
