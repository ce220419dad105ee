"""GTE's folders as the hub's own code has them, and under the names of transformers' modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from palm_ds.common.errors import UserError
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.convert.parity import compare, inputs_for
from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.runnable import in_palm_ds, load_encoder
from tests.helpers.hf_architectures import HEADS, model_of, saved
from tests.model.encoder.test_transformer import padded

SCALED = {"rope_type": "linear", "rope_theta": 160_000.0, "factor": 8 ** (2 / 12)}
HUB: dict[str, Any] = {
    "model_type": "new",
    "architectures": ["NewForMaskedLM"],
    "auto_map": {"AutoModel": "modeling.NewModel"},
    "rope_theta": 20_000,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "layer_norm_type": "layer_norm",
    "position_embedding_type": "rope",
    "pack_qkv": True,
    "logn_attention_scale": False,
    "unpad_inputs": False,
}


def as_hub(folder: Path, **values: Any) -> Path:
    """A folder of transformers as one of the hub's code."""
    state = load_file(folder / "model.safetensors")
    renamed = {name.replace("gte.", "new."): x for name, x in state.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    del about["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(about | HUB | values))
    return folder


def test_a_folder_of_the_hub_is_scaled_by_ntk_and_goes_back_as_gte(tmp_path: Path) -> None:
    """Frequencies of ntk: (20000 * 8) ** (-2 i / 12) / 8 ** (2 / 12)."""
    model, batch = model_of("gte", "ForMaskedLM", rope_parameters=SCALED), padded()
    folder = saved(model, tmp_path / "in")
    its = load_file(folder / "model.safetensors")
    encoder = load_encoder(open_contents(as_hub(folder)))
    real = batch.sequence_ids >= 0
    expected = model.gte(input_ids=batch.input_ids, attention_mask=real.long()).last_hidden_state
    torch.testing.assert_close(encoder(batch)[real], expected[real], atol=1e-5, rtol=1e-5)
    convert(folder, tmp_path / "out", "huggingface", ConversionOptions(strict=True))
    about = json.loads((tmp_path / "out/config.json").read_text())
    assert (about["model_type"], about["architectures"]) == ("gte", ["GteForMaskedLM"])
    assert about["rope_parameters"] == pytest.approx(SCALED)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == its.keys() and all(torch.equal(written[x], its[x]) for x in its)
    with pytest.raises(UserError, match="family: new can only be read; write gte"):
        convert(folder, tmp_path / "new", "huggingface", ConversionOptions(family="new"))
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"pack_qkv": False})
    )
    with pytest.raises(UserError, match="pack_qkv: must be True here, got false"):
        open_contents(folder)


@pytest.mark.parametrize("kind", ["gte", "jina_embeddings_v3"])
def test_names_of_the_hub_and_of_its_modules_are_the_same(tmp_path: Path, kind: str) -> None:
    model = model_of(kind)
    hub, native = saved(model, tmp_path / "hub"), saved(model, tmp_path / "native")
    own = {x: y.contiguous() for x, y in model.state_dict().items()}
    assert "layers.0.self_attn.q_proj.weight" in own
    save_file(own, native / "model.safetensors")
    a, b = (load_encoder(open_contents(folder))(padded()) for folder in (hub, native))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "ending",
    [pytest.param(x, marks=[] if x == "ForMaskedLM" else pytest.mark.exhaustive) for x in HEADS],
)
def test_it_may_have_no_token_types(tmp_path: Path, ending: str) -> None:
    folder = saved(model_of("gte", ending, type_vocab_size=0), tmp_path / "in")
    contents = open_contents(folder)
    report = compare(
        in_transformers(contents), in_palm_ds(contents), inputs_for(contents, contents, None)
    )
    assert report.passed and report.worst.largest < 1e-5
    assert contents.config.options == {"token_types": False}
    convert(folder, tmp_path / "out", "huggingface", ConversionOptions(strict=True))
    assert json.loads((tmp_path / "out/config.json").read_text())["type_vocab_size"] == 0
