"""NomicBert's folders under both kinds of names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.runnable import load_encoder
from tests.helpers.hf_architectures import model_of, saved
from tests.model.encoder.test_transformer import padded


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def as_hub(folder: Path) -> None:
    """A config.json of the hub's own code."""
    about = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 72,
        "n_positions": 640,
        "max_trained_positions": 320,
        "vocab_size": 64,
        "activation_function": "swiglu",
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_scaling_factor": 2,
        "layer_norm_epsilon": 1e-12,
        "qkv_proj_bias": False,
        "prenorm": False,
        "type_vocab_size": 2,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    (folder / "config.json").write_text(json.dumps(about))


def test_names_and_values_of_the_hub_and_of_its_modules_are_the_same(tmp_path: Path) -> None:
    model = model_of("nomic_bert")
    hub, native = saved(model, tmp_path / "hub"), saved(model, tmp_path / "native")
    batch, read = padded(), open_contents(hub)
    expected = load_encoder(read)(batch)
    as_hub(hub)
    assert open_contents(hub).config == read.config
    state = state_of(hub)
    save_file({f"bert.{x}": y for x, y in state.items()}, hub / "model.safetensors")
    own = {x: y.contiguous() for x, y in model.state_dict().items()}
    save_file(own, native / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in own
    for folder in (hub, native):
        assert torch.equal(load_encoder(open_contents(folder))(batch), expected)
