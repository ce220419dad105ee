"""PaddleNLP's models by name: from two files to a folder that opens, and both ways to
transformers."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.presets import PRESETS
from palm_ds.model.inputs.batch import Batch
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.download.catalogue import MODELS
from palm_ds.weights.download.downloader import Places, download
from palm_ds.weights.download.paddlenlp import PADDLENLP, PaddleModel, mirrored
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.formats.runnable import load_encoder
from tests.model.encoder.test_transformer import texts

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *map(chr, range(0x4E00, 0x4E3B))]
_NAMES = {
    "encoder.layer.": "encoder.layers.",
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm": "norm2",
    "embeddings.LayerNorm": "embeddings.layer_norm",
}


def paddles(state: dict[str, torch.Tensor], prefix: str) -> dict[str, np.ndarray]:
    """transformers' parameters under PaddleNLP's names and in its orientation."""
    found = {}
    for name, tensor in state.items():
        if "_ids" in name:
            continue
        turned = tensor.ndim == 2 and "_embeddings." not in name
        for one, other in _NAMES.items():
            name = name.replace(one, other)
        found[prefix + name] = (tensor.T if turned else tensor).contiguous().numpy()
    return found


def small(model: PaddleModel) -> tuple[PaddleModel, Any]:
    """The model with one narrow layer and few words, and the same in transformers, with random
    norms."""
    sizes = {"num_layers": 1, "hidden_size": 48, "num_heads": 4}
    model = replace(model, words=64, changes={**model.changes, **sizes})
    torch.manual_seed(5)
    made = transformers.ErnieModel(transformers.ErnieConfig(**model.config_json())).eval()
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, float("Norm.weight" in name), 0.03)
    return model, made


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ernie-3.0-tiny-nano-v1-zh", {}),
        ("ernie-3.0-tiny-pico-v2-zh", {}),
        ("uie-base", {"linear_start.weight": (48, 1), "linear_start.bias": (1,)}),
        ("utc-large", {}),
        ("rocketqa-zh-dureader-cross-encoder", {"classifier.weight": (48, 2)}),
    ],
)
def test_its_two_files_become_a_folder_that_goes_both_ways(
    name: str, more: dict[str, tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, its = small(PADDLENLP[name])
    monkeypatch.setitem(MODELS, name, model)
    arrays = paddles(its.state_dict(), "ernie.")
    if "classifier.weight" in more:
        more = {**more, "classifier.bias": (2,)}
    arrays |= {x: np.full(shape, 0.5, np.float32) for x, shape in more.items()}
    for address, data in (
        (model.url, pickle.dumps(arrays, 4)),
        (model.vocabulary, ("\n".join(WORDS) + "\n").encode()),
    ):
        file = tmp_path / "mirror" / mirrored(address)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    places = Places(mirror=str(tmp_path / "mirror"), cache=tmp_path / "cache")
    folder = download(name, path=tmp_path, places=places)
    assert load_tokenizer(folder).encode_words(["一丁"]) == [[5, 6]]

    contents = open_checkpoint(folder)
    config = EncoderConfig.from_dict({"preset": model.preset, "vocab_size": 64, **model.changes})
    config = replace(config, layer_norm_eps=1e-12, intermediate_size=config.feed_forward_size)
    assert contents.config == config
    batch = Batch.from_rows([texts((30,))], length=30, pad=0)
    batch.task_ids.fill_(0)
    with torch.no_grad():
        found = load_encoder(contents)(batch)
        expected = its(batch.input_ids, token_type_ids=batch.token_type_ids).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    lost = [x for x in more if x.startswith("linear")]
    assert sorted(contents.skipped) == sorted(lost)
    options = ConversionOptions(strict=not lost, family="ernie")
    convert(folder, tmp_path / "hf", "huggingface", options)
    again = transformers.ErnieModel.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(x, again[key]) for key, x in its.state_dict().items())
    convert(tmp_path / "hf", tmp_path / "back", "paddle", options)
    back = pickle.loads((tmp_path / "back" / "model_state.pdparams").read_bytes())
    kept = {re.sub(r"^ernie\.", "", x): y for x, y in arrays.items() if x not in lost}
    assert kept.keys() <= {re.sub(r"^ernie\.", "", x) for x in back}
    for key, values in back.items():
        if (short := re.sub(r"^ernie\.", "", key)) in kept:
            np.testing.assert_array_equal(values, kept[short])


def test_what_cannot_be_read_says_why() -> None:
    for name, model in PADDLENLP.items():
        assert MODELS[name] is model and model.preset in PRESETS
        assert model.config_json()["vocab_size"] == model.words
    assert [name for name, x in PADDLENLP.items() if x.not_yet] == ["ernie-3.0-tiny-mini-v2-en"]
    files = [(model.url, name) for name, model in PADDLENLP.items() if "-v1-zh" not in name]
    assert len({url for url, _ in files}) == len(files)


def test_a_file_that_a_mirror_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no uie/uie_nano.pdparams in the mirror"):
        download("uie-nano", path=tmp_path, places=Places(mirror=str(tmp_path), cache=tmp_path))
    assert not (tmp_path / "pretrain" / "uie-nano").exists()
