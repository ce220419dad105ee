"""The values of a layer's specification, against transformers' ModernBERT and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import ModernBertConfig, ModernBertModel

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.flops import training_flops
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.positions import Rotary
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.dropout import dropout_keys

CONFIG = EncoderConfig(
    vocab_size=64,
    hidden_size=48,
    num_layers=4,
    num_heads=4,
    intermediate_size=72,
    max_positions=320,
    token_types=1,
    task_types=0,
    dropout=0.0,
    attention_dropout=0.0,
    layer_norm_eps=1e-5,
    kind="tests.model.encoder.test_transformer.Modern",
)
WINDOW = 64
LENGTHS = (300, 37, 1)


class Modern(TransformerEncoder):
    """ModernBERT: every third layer sees the whole text."""

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        local = LayerSpec(
            norm_place="pre",
            norm="layer_norm_without_bias",
            qkv_bias=False,
            attention_output_bias=False,
            intermediate_bias=False,
            output_bias=False,
            gated=True,
            rotary_base=10_000.0,
            window=WINDOW,
        )
        whole = replace(local, window=None, rotary_base=160_000.0)
        layers = [local if number % 3 else whole for number in range(config.num_layers)]
        return TransformerSpec(
            layers=(replace(layers[0], attention_norm=False), *layers[1:]),
            learned_positions=False,
            token_types=False,
            norm="layer_norm_without_bias",
            final_norm=True,
        )


NAMES = {
    "word": "embeddings.tok_embeddings",
    "norm": "embeddings.norm",
    "final_norm": "final_norm",
    "qkv": "attn.Wqkv",
    "project": "attn.Wo",
    "attention_norm": "attn_norm",
    "expand": "mlp.Wi",
    "contract": "mlp.Wo",
    "output_norm": "mlp_norm",
}


def modernbert() -> ModernBertModel:
    """With random norms, or nothing would show that one is missing."""
    torch.manual_seed(3)
    made: Any = ModernBertConfig  # it takes older keys, too
    model = ModernBertModel(
        made(
            vocab_size=64,
            hidden_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=72,
            max_position_embeddings=320,
            global_attn_every_n_layers=3,
            local_attention=2 * WINDOW,
            pad_token_id=0,
            attn_implementation="eager",
        )
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def converted(source: ModernBertModel, attention: str = "plain") -> Modern:
    encoder = Modern(CONFIG, Kernels(attention=attention)).eval()
    state = source.state_dict()
    taken = {}
    for name in encoder.state_dict():
        *layer, part, end = name.rsplit(".", 2)
        if not name.startswith("pooler."):
            taken[name] = state.pop(".".join([*layer, NAMES[part], end]))
    assert not state, "every parameter has a place"
    encoder.load_state_dict(taken, strict=False)
    return encoder


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[PackedText]:
    rng = np.random.default_rng(0)
    return [
        PackedText(input_ids=rng.integers(1, 64, n), token_type_ids=np.zeros(n, np.int64))
        for n in lengths
    ]


def padded() -> Batch:
    return Batch.from_rows([[text] for text in texts()], length=max(LENGTHS), pad=0)


def weighted(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.arange(x.numel(), device=x.device).view(x.shape).sin()).sum()


@pytest.mark.parametrize("attention", ["plain", "tiles", "sdpa"])
def test_it_computes_what_transformers_does(attention: str) -> None:
    """Texts longer than twice the window, padding in the batch, outputs and gradients."""
    model, batch = modernbert(), padded()
    encoder = converted(model, attention)
    real = batch.sequence_ids >= 0
    expected = model(input_ids=batch.input_ids, attention_mask=real.long()).last_hidden_state[real]
    found = encoder(batch)[real]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weighted(expected).backward()
    weighted(found).backward()
    pairs: Any = zip(encoder.layers, model.layers, strict=True)
    for layer, other in pairs:
        for mine, its in ((layer.qkv, other.attn.Wqkv), (layer.expand, other.mlp.Wi)):
            scale = its.weight.grad.abs().max()
            torch.testing.assert_close(mine.weight.grad / scale, its.weight.grad / scale, atol=1e-5,
                                       rtol=1e-4)  # fmt: skip


def test_swapped_halves_and_other_windows_differ() -> None:
    """What the test above would not see if it were too tolerant."""
    encoder, batch = converted(modernbert()), padded()
    right = encoder(batch)
    near: Any = encoder.layers[1]
    near.spec = replace(near.spec, window=WINDOW - 1)
    assert (encoder(batch) - right)[0].abs().max() > 1e-4
    near.spec = replace(near.spec, window=WINDOW)
    near.expand.weight.data = near.expand.weight.data.roll(72, 0)
    assert (encoder(batch) - right).abs().max() > 1e-4


@pytest.mark.parametrize("attention", ["plain", "tiles", "sdpa"])
def test_packed_rows_compute_what_single_ones_do(attention: str) -> None:
    encoder = converted(modernbert(), attention)
    alone = encoder(padded())
    packed = encoder(Batch.from_rows([texts()], length=sum(LENGTHS) + 6, pad=0))[0]
    start = 0
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(
            packed[start : start + length], alone[row, :length], atol=1e-5, rtol=1e-5
        )
        start += length


def test_positions_of_interest_alone_and_recomputation_change_nothing() -> None:
    encoder, batch = converted(modernbert()).train(), padded()
    at = torch.tensor([2, 299, 310])
    out = encoder(batch)
    torch.testing.assert_close(encoder(batch, at), out.flatten(0, 1)[at])
    weighted(out).backward()
    once = [p.grad for p in encoder.layers.parameters()]
    encoder.zero_grad()
    encoder.recompute = True
    weighted(encoder(batch)).backward()
    again = [p.grad for p in encoder.layers.parameters()]
    for a, b in zip(once, again, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_what_is_recorded_is_what_transformers_returns() -> None:
    """The last hidden state is that after the final norm; queries and keys are turned."""
    model, batch = modernbert(), padded()
    encoder, real = converted(model), batch.sequence_ids >= 0
    out = model(input_ids=batch.input_ids, attention_mask=real.long(), output_hidden_states=True)
    with recorded(encoder, WantedStates(embeddings=True, hidden=(1, 2, 3, 4), qkv=(2,))) as states:
        last = encoder(batch)
    assert states.embeddings is not None
    for found, expected in zip(
        [states.embeddings, *states.hidden.values()], out.hidden_states, strict=True
    ):
        torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)
    assert torch.equal(states.hidden[4], last)
    layer: Any = encoder.layers[1]
    by_hand = layer.qkv(layer.attention_norm(states.hidden[1]))
    assert torch.equal(states.qkv[2][..., 96:], by_hand[..., 96:])
    assert not torch.allclose(states.qkv[2][real][..., :48], by_hand[real][..., :48], atol=1e-3)


@pytest.mark.parametrize("neighbors", [False, True])
def test_products_of_turned_vectors_depend_on_the_distance_alone(neighbors: bool) -> None:
    rotary = Rotary(100.0, 2, neighbors=neighbors)
    qkv = torch.randn(1, 1, 24).expand(1, 9, 24)
    positions = torch.arange(9)[None]

    def products(shift: int) -> torch.Tensor:
        q, k, v = (
            rotary(qkv, rotary.rotation(positions + shift, 4)).unflatten(-1, (3, 2, 4)).unbind(2)
        )
        assert torch.equal(v.flatten(2), qkv[..., 16:])
        return torch.einsum("rihd,rjhd->rhij", q, k)

    torch.testing.assert_close(products(0), products(31), atol=1e-4, rtol=1e-4)
    assert products(0).std(-1).min() > 1e-3
    torch.testing.assert_close(products(0)[..., 1:, 1:], products(0)[..., :-1, :-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_layouts_turn_the_same_pairs(dtype: torch.dtype) -> None:
    """Neighbors of a permuted vector are halves of the vector, and their gradients likewise: to
    the bit, although autograd computes those of neighbors, and halves on CPUs have their own."""
    positions = torch.arange(5).expand(2, 5)
    qkv, sign = torch.randn(2, 5, 24).to(dtype), torch.randn(2, 5, 24).to(dtype)
    order = torch.arange(8).view(4, 2).T.flatten()  # 0 2 4 6 1 3 5 7

    def permuted(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (3, 8))[..., order].flatten(-2)

    def turned(rotary: Rotary, qkv: torch.Tensor, sign: torch.Tensor) -> list[torch.Tensor]:
        x = qkv.clone().requires_grad_()
        out = rotary(x, rotary.rotation(positions, 8))
        out.backward(sign)
        assert x.grad is not None
        return [out.detach(), x.grad]

    halves = turned(Rotary(10.0, 1), permuted(qkv), permuted(sign))
    neighbors = turned(Rotary(10.0, 1, neighbors=True), qkv, sign)
    for found, expected in zip(halves, neighbors, strict=True):
        assert torch.equal(found, permuted(expected))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch
def test_torch_compile_takes_a_rotation_whole() -> None:
    rotary, positions = Rotary(10.0, 1), torch.arange(5).expand(2, 5)
    rotation, found = rotary.rotation(positions, 8), []
    qkv, sign = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    for turned in (rotary, torch.compile(rotary, fullgraph=True, backend="eager")):
        x = qkv.clone().requires_grad_()
        turned(x, rotation).backward(sign)
        found.append(x.grad)
    assert torch.equal(*found)


def test_predictions_turn_by_kept_tables() -> None:
    rotary = Rotary(100.0, 2, 1, factor=3.0)  # heads of 8: two of queries, one of keys and values
    for last in (3, 40, 9):
        qkv, positions = torch.randn(2, last, 32), torch.arange(last).flip(0).expand(2, last)
        expected = rotary(qkv, rotary.rotation(positions, 8))
        with torch.inference_mode():
            found = rotary(qkv.clone(), rotary.rotation(positions, 8))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        rotary.base *= 1.5


def test_it_drops_by_place_as_any_layer() -> None:
    config = replace(CONFIG, dropout=0.2, attention_dropout=0.2)
    torch.manual_seed(0)
    encoder = Modern(config, Kernels(attention="tiles", dropout="counter")).train()
    batch = replace(padded(), dropout_key=5)
    assert torch.equal(encoder(batch), encoder(batch))
    assert dropout_keys(batch, 48) is not None
    assert not torch.allclose(encoder(batch), encoder(replace(batch, dropout_key=6)))


def test_flops_are_those_that_torch_counts() -> None:
    """Of a text within the window; beyond it, torch's dense product counts what is not needed."""
    encoder = Modern(CONFIG).train()
    short = Batch.from_rows([texts((WINDOW,))], length=WINDOW, pad=0)
    with FlopCounterMode(display=False) as counter:
        encoder(short).sum().backward()
    counted = float(training_flops(CONFIG, short, []))
    assert counter.get_total_flops() == pytest.approx(counted, rel=1e-9)
    long = Batch.from_rows([texts((300, 20))], length=320, pad=0)
    near = sum(min(i, WINDOW) + min(n - 1 - i, WINDOW) + 1 for n in (300, 20) for i in range(n))
    matrices = 4 * 48**2 + 3 * 48 * 72
    expected = 6 * 4 * matrices * 320 + 12 * 48 * (2 * (300**2 + 20**2) + 2 * near)
    assert float(training_flops(CONFIG, long, [])) == expected


def test_other_norms_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Post-norm with rotary positions and a gate, by hand (nomic-bert)."""
    spec = LayerSpec(norm="rms_norm", gated=True, rotary_base=1000.0, activation="relu")
    body = TransformerSpec(layers=(spec,), learned_positions=False, embedding_norm=False)
    encoder = built(monkeypatch, body, replace(CONFIG, num_layers=1, token_types=2))
    batch = padded()
    layer: Any = encoder.layers[0]
    x = encoder.word(batch.input_ids) + encoder.segment(batch.token_type_ids)
    one, two = (nn.RMSNorm(48, eps=1e-5) for _ in range(2))
    one.load_state_dict(layer.attention_norm.state_dict())
    two.load_state_dict(layer.output_norm.state_dict())
    rotation = layer.rotary.rotation(batch.position_ids, 12)
    q, k, v = layer.rotary(layer.qkv(x), rotation).unflatten(-1, (3, 4, 12)).unbind(2)
    scores = torch.einsum("rihd,rjhd->rhij", q, k) / 12**0.5
    same = batch.sequence_ids[:, None, :, None] == batch.sequence_ids[:, None, None]
    weights = scores.masked_fill(~same, -torch.inf).softmax(-1)
    seen = torch.einsum("rhij,rjhd->rihd", weights, v).flatten(2)
    x = one(x + layer.project(seen))
    first, second = layer.expand(x).chunk(2, -1)
    expected = two(x + layer.contract(first.relu() * second))
    real = batch.sequence_ids >= 0
    torch.testing.assert_close(encoder(batch)[real], expected[real], atol=1e-5, rtol=1e-5)


def built(
    monkeypatch: pytest.MonkeyPatch, spec: TransformerSpec, config: EncoderConfig
) -> TransformerEncoder:
    monkeypatch.setattr(Modern, "spec", lambda *_: spec)
    torch.manual_seed(1)
    return Modern(config).eval()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"token_types": 2}, "token_types: 2, but .*Modern has no token type embedding; set 1"),
        ({"position_offset": 2}, "position_offset: 2, but .*Modern has no position embedding"),
        ({"num_heads": 16}, "num_heads: heads of 3 values, but .*Modern turns them in pairs"),
    ],
)
def test_hyperparameters_that_do_not_fit(values: dict[str, int], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        Modern(replace(CONFIG, **values))
