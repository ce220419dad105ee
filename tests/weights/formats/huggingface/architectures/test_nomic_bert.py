"""NomicBert's folders under both kinds of names: read, computed, written as they came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import NomicBertConfig

from palm_ds.common.errors import UserError
from palm_ds.model.inputs.batch import Batch
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.convert.parity import compare, inputs_for
from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.runnable import in_palm_ds, load_encoder
from tests.model.encoder.test_transformer import padded, texts, weighted

ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 320,
    "attn_implementation": "eager",
}


def nomic_bert(ending: str = "Model", **values: Any) -> Any:
    """With random norms and biases, or nothing would show that one is missing."""
    torch.manual_seed(3)
    config = NomicBertConfig(**{**SIZES, **values})
    model = getattr(transformers, f"NomicBert{ending}")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() and name.endswith("weight"):
            nn.init.normal_(parameter, 1.0, 0.3)
        elif name.endswith("bias"):
            nn.init.normal_(parameter)
        else:
            nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_class_is_computed_and_written_as_it_was_read(tmp_path: Path, ending: str) -> None:
    source, target = saved(nomic_bert(ending), tmp_path / "in"), tmp_path / "out"
    contents = open_contents(source)
    report = compare(
        in_transformers(contents), in_palm_ds(contents), inputs_for(contents, contents, None)
    )
    assert report.passed and report.worst.largest < 1e-5
    assert {f"head {x}" for x in contents.heads} <= {each.name for each in report.differences}
    convert(source, target, "huggingface", ConversionOptions(strict=True))
    written, read = state_of(target), state_of(source)
    assert written.keys() == read.keys()
    assert all(torch.equal(written[x], read[x]) for x in read)
    opened: Any = getattr(transformers, f"NomicBert{ending}")
    _, loading = opened.from_pretrained(target, output_loading_info=True)
    assert not any(loading.values())


def test_published_shape_has_transformers_outputs_and_gradients(tmp_path: Path) -> None:
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    model = nomic_bert(**sizes)
    encoder, batch = load_encoder(open_contents(saved(model, tmp_path))), padded()
    real = batch.sequence_ids >= 0
    batch.token_type_ids.copy_(batch.input_ids % 2)
    given = {"attention_mask": real.long(), "token_type_ids": batch.token_type_ids}
    expected = model(input_ids=batch.input_ids, **given).last_hidden_state[real]
    found = encoder(batch)[real]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weighted(expected).backward()
    weighted(found).backward()
    pairs: Any = zip(encoder.layers, model.layers, strict=True)
    for layer, other in pairs:
        gated = torch.cat([other.mlp.gate_proj.weight.grad, other.mlp.up_proj.weight.grad])
        scale = float(gated.abs().max())
        torch.testing.assert_close(layer.expand.weight.grad, gated, atol=1e-5 * scale, rtol=0)


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
    model = nomic_bert()
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


def test_swapped_halves_of_a_gate_are_noticed(tmp_path: Path) -> None:
    right, wrong = (saved(nomic_bert(), tmp_path / x) for x in "ab")
    state = state_of(wrong)
    one, other = (f"encoder.layers.1.mlp.fc1{x}.weight" for x in (1, 2))
    state[one], state[other] = state[other].clone(), state[one].clone()
    save_file(state, wrong / "model.safetensors", {"format": "pt"})
    a, b = open_contents(right), open_contents(wrong)
    assert not compare(in_transformers(a), in_palm_ds(b), inputs_for(a, b, None)).passed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: must be 'silu' here, got"),
        ({"prenorm": True}, "prenorm: must be False here, got true"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction: must be 1.0 here"),
        ({"hidden_size": "48"}, "hidden_size: expected a whole number"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0}},
            "rope_parameters.rope_type: must be default here",
        ),
    ],
)
def test_another_model_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = saved(nomic_bert(), tmp_path)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | values))
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        open_contents(folder)


def test_a_text_is_the_same_in_a_packed_row(tmp_path: Path) -> None:
    encoder = load_encoder(open_contents(saved(nomic_bert(), tmp_path)))
    several = texts((30, 1, 9))
    packed, start = encoder(Batch.from_rows([several], length=48, pad=0))[0], 0
    for text in several:
        size = len(text.input_ids)
        alone = encoder(Batch.from_rows([[text]], length=size, pad=0))[0]
        torch.testing.assert_close(packed[start : start + size], alone, atol=1e-5, rtol=1e-5)
        start += size
