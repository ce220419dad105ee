import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.multi_task_model import Model, prepare_to_predict
from palm_ds.model.ops import packed_linear
from palm_ds.model.ops.packed_linear import PackedLinear, onednn_packs, packed_form

SMALL = EncoderConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=80, max_positions=40
)
GATED = replace(SMALL, kind="modernbert", token_types=1, task_types=0)
needs_packing = pytest.mark.skipif(
    not onednn_packs(torch.float32), reason="oneDNN's packed linear maps need an x86 CPU"
)


@pytest.fixture(params=["columns", "onednn"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form of linear maps, whatever the processor."""
    monkeypatch.setattr(packed_linear, "packed_form", lambda dtype: request.param)
    return request.param


def model(config: EncoderConfig = SMALL) -> Model:
    torch.manual_seed(0)
    return Model(build_encoder(config), {}, {}).eval()


def batch(rows: int) -> Batch:
    ids = (torch.arange(30) * 7 % 50).numpy()
    text = PackedText(input_ids=ids, token_type_ids=0 * ids)
    return Batch.from_rows([[text]] * rows, length=32, pad=0)


@needs_packing
@pytest.mark.parametrize("config", [SMALL, GATED], ids=["bert", "gated"])
def test_a_prepared_encoder_computes_the_same(form: str, config: EncoderConfig) -> None:
    plain = model(config)
    packed = prepare_to_predict(copy.deepcopy(plain), "cpu", torch.float32)
    assert isinstance(packed.backbone.layers[0].qkv, PackedLinear)
    expected = plain.backbone(batch(2))
    with torch.inference_mode():
        found = packed.backbone(batch(2))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        layers: Any = (packed.backbone.layers[0], plain.backbone.layers[0])
        whole, own = (layer.expand(found) for layer in layers)
    torch.testing.assert_close(whole, own, atol=1e-5, rtol=0)


def test_a_prepared_encoder_computes_the_same_in_bf16() -> None:
    if not packed_form(torch.bfloat16):
        pytest.skip("oneDNN does not pack bf16 here")
    plain = model().to(torch.bfloat16)
    packed = prepare_to_predict(copy.deepcopy(plain), "cpu", torch.bfloat16)
    with torch.inference_mode():
        expected, found = plain.backbone(batch(2)), packed.backbone(batch(2))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)


@needs_packing
@pytest.mark.parametrize("config", [SMALL, GATED], ids=["bert", "gated"])
def test_the_state_dict_stays_what_it_was(form: str, config: EncoderConfig) -> None:
    plain = model(config)
    packed = prepare_to_predict(copy.deepcopy(plain), "cpu", torch.float32)
    expected = plain.state_dict()
    for found in (packed.state_dict(), pickle.loads(pickle.dumps(packed)).state_dict()):
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(found[name].is_contiguous() for name in expected)  # as files need it


@needs_packing
def test_a_text_gets_the_same_vector_whatever_else_is_in_the_batch(form: str) -> None:
    packed = prepare_to_predict(model(), "cpu", torch.float32)
    tolerance = 1e-6 if form == "columns" else 0  # MKL has a way for each number of rows
    with torch.inference_mode():
        alone, among = packed.backbone(batch(1))[0, :30], packed.backbone(batch(9))[4, :30]
        torch.testing.assert_close(among, alone, atol=tolerance, rtol=0)
        nothing = packed.backbone(batch(1), torch.empty(0, dtype=torch.int64))
    assert nothing.shape == (0, 32)


def test_fp16_is_left_to_torch() -> None:
    assert not packed_form(torch.float16)
    half = prepare_to_predict(model(), "cpu", torch.float16)
    assert type(half.backbone.layers[0].qkv) is torch.nn.Linear


def test_the_processor_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(packed_linear, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(packed_linear, "onednn_packs", lambda dtype: True)
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
    forms = {"GenuineIntel": "columns", "AuthenticAMD": "onednn"}
    for vendor, fastest in forms.items():
        (tmp_path / "cpuinfo").write_text(f"processor: 0\nvendor_id: {vendor}\n")
        assert packed_form.__wrapped__(torch.float32) == fastest
        assert packed_form.__wrapped__(torch.bfloat16) == "onednn"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert packed_form.__wrapped__(torch.float32) == ""


def test_trying_it_leaves_random_numbers_alone() -> None:
    onednn_packs.cache_clear()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    onednn_packs(torch.float32)
    assert torch.equal(torch.rand(3), expected)


@needs_packing
def test_custom_layers_keep_their_linear_maps(form: str) -> None:
    made = model()
    made.backbone.layers[1] = torch.nn.Identity()
    made.backbone.layers[0].project = torch.nn.Sequential(torch.nn.Linear(32, 32))
    prepare_to_predict(made, "cpu", torch.float32)
    assert isinstance(made.backbone.layers[0].project, torch.nn.Sequential)
    assert isinstance(made.backbone.layers[0].expand, PackedLinear)


@needs_packing
def test_a_copy_may_be_moved_and_packed_again(form: str) -> None:
    packed = prepare_to_predict(model(GATED), "cpu", torch.float32)
    copied = copy.deepcopy(packed)
    assert type(copied.backbone.layers[0].qkv) is torch.nn.Linear
    assert not copied.training and len(list(copied.parameters())) == len(
        list(model(GATED).parameters())
    )
    again = prepare_to_predict(copied, "cpu", torch.float32)
    with torch.inference_mode():
        assert torch.equal(again.backbone(batch(2)), packed.backbone(batch(2)))
