import copy

import pytest
import torch

from palm_ds.model.encoder.encoder import EncoderConfig, build_encoder
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.multi_task_model import Model
from palm_ds.model.packed_linear import PackedLinear, can_pack, prepare_to_predict

SMALL = EncoderConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=80, max_positions=40
)
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="oneDNN's packed linear maps need an x86 CPU"
)


def model() -> Model:
    torch.manual_seed(0)
    return Model(build_encoder(SMALL), {}, {}).eval()


def batch(rows: int) -> Batch:
    ids = (torch.arange(30) * 7 % 50).numpy()
    text = PackedText(input_ids=ids, token_type_ids=0 * ids)
    return Batch.from_rows([[text]] * rows, length=32, pad=0)


@needs_packing
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str
)
def test_a_packed_encoder_computes_the_same(dtype: torch.dtype, tolerance: float) -> None:
    if not can_pack(dtype):
        pytest.skip(f"oneDNN does not pack {dtype} here")
    plain = model().to(dtype)
    packed = prepare_to_predict(copy.deepcopy(plain), "cpu", dtype)
    assert isinstance(packed.backbone.layers[0].qkv, PackedLinear)
    with torch.inference_mode():
        expected, found = plain.backbone(batch(2)), packed.backbone(batch(2))
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@needs_packing
def test_the_state_dict_stays_what_it_was() -> None:
    plain = model()
    packed = prepare_to_predict(copy.deepcopy(plain), "cpu", torch.float32)
    expected, found = plain.state_dict(), packed.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@needs_packing
def test_a_text_gets_the_same_vector_whatever_else_is_in_the_batch() -> None:
    packed = prepare_to_predict(model(), "cpu", torch.float32)
    with torch.inference_mode():
        alone = packed.backbone(batch(1))
        assert torch.equal(packed.backbone(batch(9))[4], alone[0])
        nothing = packed.backbone(batch(1), torch.empty(0, dtype=torch.int64))
    assert nothing.shape == (0, 32)


def test_fp16_is_left_to_torch() -> None:
    assert not can_pack(torch.float16)
    half = prepare_to_predict(model(), "cpu", torch.float16)
    assert type(half.backbone.layers[0].qkv) is torch.nn.Linear


def test_trying_it_leaves_random_numbers_alone() -> None:
    can_pack.cache_clear()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    can_pack(torch.float32)
    assert torch.equal(torch.rand(3), expected)


@needs_packing
def test_custom_layers_keep_their_linear_maps() -> None:
    made = model()
    made.backbone.layers[1] = torch.nn.Identity()
    made.backbone.layers[0].project = torch.nn.Sequential(torch.nn.Linear(32, 32))
    prepare_to_predict(made, "cpu", torch.float32)
    assert isinstance(made.backbone.layers[0].project, torch.nn.Sequential)
    assert isinstance(made.backbone.layers[0].expand, PackedLinear)


@needs_packing
def test_a_copy_may_be_moved_and_packed_again() -> None:
    packed = prepare_to_predict(model(), "cpu", torch.float32)
    copied = copy.deepcopy(packed)
    assert type(copied.backbone.layers[0].qkv) is torch.nn.Linear
    assert not copied.training and len(list(copied.parameters())) == len(list(model().parameters()))
    again = prepare_to_predict(copied, "cpu", torch.float32)
    with torch.inference_mode():
        assert torch.equal(again.backbone(batch(2)), packed.backbone(batch(2)))
