"""Who attends to whom: in words, as a dense mask, and in every form of attention."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.model.attention.attention import attend, plan_attention
from palm_ds.model.attention.tiles import TILE
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.visibility import (
    Visibility,
    causal,
    full,
    multi_flow,
    prefix_lm,
    visible,
)
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.dropout import dropout_keys
from tests.model.attention.test_attention import compare

FP32, BF16 = torch.float32, torch.bfloat16
CONFIG = EncoderConfig(vocab_size=50, hidden_size=32, num_heads=2, num_layers=2)


def text_of(tokens: int, visibility: Visibility | None = None) -> PackedText:
    return PackedText(
        input_ids=np.arange(tokens, dtype=np.int64) % 50,
        token_type_ids=np.zeros(tokens, np.int64),
        visibility=visibility,
    )


def flows(source: int, target: int, *queries: list[int]) -> PackedText:
    """A text with a source, a target and the queries of each flow."""
    total = source + target + sum(map(len, queries))
    return text_of(total, multi_flow(source, target, [np.array(each) for each in queries]))


def dense(text: PackedText) -> np.ndarray:
    """(tokens, tokens) bool, token by token from the definition."""
    size, rule = len(text.input_ids), text.visibility
    mask = np.ones((size, size), bool)
    for i in range(size):
        for j in range(size):
            if rule is not None:
                mask[i, j] = i == j or rule.order[j] <= rule.limit[i]
    return mask


def dense_of_rows(rows: list[list[PackedText]], length: int) -> torch.Tensor:
    """(rows, length, length) bool: blocks on the diagonal; padding is one block."""
    mask = torch.zeros(len(rows), length, length, dtype=torch.bool)
    for r, row in enumerate(rows):
        at = 0
        for text in row:
            end = at + len(text.input_ids)
            mask[r, at:end, at:end] = torch.from_numpy(dense(text))
            at = end
        mask[r, at:, at:] = True
    return mask


MIXED = [
    [flows(3, 2, [0, 1]), text_of(4), flows(1, 3, [0, 1, 2], [0, 0, 2])],
    [text_of(5), text_of(6, prefix_lm(2, 4)), text_of(2, full(2))],
    [],
]
LONG = [
    [flows(TILE + 9, 5, [0, 1, 2, 3], [0, 0, 2, 2]), text_of(3)],
    [text_of(2 * TILE), text_of(9)],
]
ALSO_LONG = [[flows(31, 6, [0, 1, 2, 3, 4], [0, 0, 2, 2, 4]), text_of(2)], [text_of(33)]]
ROWS = [(MIXED, 22), (ALSO_LONG, 53), (LONG, 2 * TILE + 9)]


def test_full_prefix_and_flows_in_words() -> None:
    """As drawn in figure 3 of the paper: rows attend, columns are attended to."""
    assert dense(text_of(3, full(3))).all()
    np.testing.assert_array_equal(
        dense(text_of(4, prefix_lm(2, 2))).astype(int),
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    )
    word, span = [0, 1, 2], [0, 1, 1]
    np.testing.assert_array_equal(
        dense(flows(1, 3, word, span)).astype(int),
        [
            [1, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # source
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 0],  # targets
            [1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 1, 0, 0, 0, 0, 0],  # queries word by word
            [1, 1, 0, 0, 0, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 1, 0, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 1, 0, 0],  # queries span by span: 1, then 2 and 3
            [1, 1, 0, 0, 0, 0, 0, 0, 1, 0],
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 1],
        ],
    )


@pytest.mark.parametrize(("rows", "length"), ROWS)
def test_the_mask_of_mixed_rows(rows: list[list[PackedText]], length: int) -> None:
    batch = Batch.from_rows(rows, length=length, pad=0)
    assert batch.visibility is not None
    ids = batch.sequence_ids
    mask = (ids[:, :, None] == ids[:, None, :]) & visible(batch.visibility)
    expected = dense_of_rows(rows, length)
    assert torch.equal(mask, expected)
    plan = plan_attention(batch, "plain")
    assert plan.mask is not None and torch.equal(plan.mask[:, 0], expected)


@pytest.mark.parametrize(
    ("kernel", "dtype", "dropout"),
    [
        *itertools.product(("plain", "sdpa", "tiles"), (FP32, BF16), (0.0, 0.3)),
        ("triton", FP32, 0.0),
        ("triton", BF16, 0.3),
        *(
            pytest.param("triton", *case, marks=pytest.mark.exhaustive)
            for case in ((FP32, 0.3), (BF16, 0.0))
        ),
    ],
)
@pytest.mark.parametrize(("rows", "length"), ROWS)
def test_every_form_is_attention_under_the_mask(
    rows: list[list[PackedText]],
    length: int,
    kernel: str,
    dropout: float,
    dtype: torch.dtype,
    request: pytest.FixtureRequest,
) -> None:
    if kernel == "triton":
        request.getfixturevalue("interpreted")
    if kernel == "sdpa" and dropout:
        pytest.skip("it draws its own masks")
    if kernel == "triton" and length > TILE:
        pytest.skip("slow in the interpreter")
    batch = Batch.from_rows(rows, length=length, pad=0)
    qkv = torch.randn(len(rows), length, 3 * 2 * 8).to(dtype)
    keys = dropout_keys(batch, length) if dropout else None
    compare(batch, qkv, kernel, keys, num_heads=2, dropout=dropout)
    if dropout or dtype != torch.float32:
        return
    query, key, value = (x.view(len(rows), length, 2, 8).transpose(1, 2) for x in qkv.chunk(3, -1))
    scores = (query @ key.transpose(2, 3) / 8**0.5).double()
    hidden = ~dense_of_rows(rows, length)[:, None]
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value.double()
    found = attend(qkv, plan_attention(batch, kernel), num_heads=2)
    torch.testing.assert_close(
        found.double(), expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-4
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["sdpa", "triton"])
@pytest.mark.parametrize(("rows", "length"), ROWS)
def test_on_a_gpu(
    rows: list[list[PackedText]], length: int, kernel: str, dtype: torch.dtype
) -> None:
    batch = Batch.from_rows(rows, length=length, pad=0).to("cuda")
    qkv = torch.randn(len(rows), length, 3 * 2 * 64).to("cuda", dtype)
    keys = dropout_keys(batch, length) if kernel == "triton" else None
    compare(batch, qkv, kernel, keys, num_heads=2, dropout=0.3 if keys else 0.0)


@pytest.mark.parametrize("kernel", ["plain", "sdpa", "tiles"])
def test_ordinary_texts_do_not_notice_others_in_their_batch(kernel: str) -> None:
    """Bit for bit, forward and backward."""
    ordinary = [[text_of(5), text_of(7)], [text_of(9)]]
    with_others = [*ordinary, [flows(3, 2, [0, 1])]]
    torch.manual_seed(0)
    qkv = torch.randn(3, 12, 3 * 8)
    results = []
    for rows in (ordinary, with_others):
        batch = Batch.from_rows(rows, length=12, pad=0)
        x = qkv[: len(rows)].clone().requires_grad_()
        out = attend(x, plan_attention(batch, kernel), num_heads=2)
        out[:2].square().sum().backward()
        assert x.grad is not None
        results.append((out[:2].detach(), x.grad[:2]))
    for alone, mixed in zip(*results, strict=True):
        assert torch.equal(alone, mixed)


def test_a_batch_of_ordinary_texts_has_no_visibility() -> None:
    batch = Batch.from_rows([[text_of(3)], []], length=4, pad=0)
    assert batch.visibility is None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]


def test_queries_share_the_positions_of_their_targets() -> None:
    text = replace(flows(2, 2, [0, 1]), position_ids=np.array([0, 1, 2, 3, 2, 3]))
    batch = Batch.from_rows([[text_of(1), text]], length=8, pad=0)
    assert batch.position_ids.tolist() == [[0, 0, 1, 2, 3, 2, 3, 0]]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["plain", "tiles"])
def test_a_query_is_as_in_a_pass_of_its_own(attention: str, recompute: bool) -> None:
    """The vectors of an encoder at each token are those of a text that holds only what the token,
    and what it attends to, attend to."""
    torch.manual_seed(0)
    encoder = build_encoder(CONFIG, Kernels(attention=attention), recompute=recompute).eval()
    text = replace(
        flows(3, 3, [0, 1, 2], [0, 1, 1]), position_ids=np.array([0, 1, 2, *[3, 4, 5] * 3])
    )
    assert text.visibility is not None and text.position_ids is not None
    out = encoder(Batch.from_rows([[text_of(4), text]], length=20, pad=0))[0, 4:]
    for query, context in [(6, 3), (7, 4), (8, 5), (9, 3), (10, 4), (11, 4)]:
        kept = [*range(context), query]
        alone = PackedText(
            input_ids=text.input_ids[kept],
            token_type_ids=text.token_type_ids[kept],
            position_ids=text.position_ids[kept],
            visibility=Visibility(text.visibility.order[kept], text.visibility.limit[kept]),
        )
        found = encoder(Batch.from_rows([[alone]], length=len(kept), pad=0))[0]
        torch.testing.assert_close(out[kept], found, atol=1e-5, rtol=1e-4)


def test_windows_are_refused_where_queries_stand_far_from_what_they_see() -> None:
    text = replace(flows(2, 2, [0, 1]), position_ids=np.array([0, 1, 2, 3, 2, 3]))
    batch = Batch.from_rows([[text, text_of(3, causal(3))]], length=9, pad=0)
    with pytest.raises(UserError, match="without windows"):
        attend(torch.randn(1, 9, 24), plan_attention(batch, "plain"), num_heads=2, window=3)


LEFT_TO_RIGHT = [
    [text_of(7, causal(7)), text_of(4), text_of(5, causal(5))],
    [text_of(TILE - 20, causal(TILE - 20))],
    [],
]


@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        *itertools.product(("plain", "sdpa", "tiles"), (None, 1, 6)),
        ("triton", 6),
        *(pytest.param("triton", x, marks=pytest.mark.exhaustive) for x in (None, 1)),
    ],
)
def test_left_to_right_within_windows(
    kernel: str, window: int | None, request: pytest.FixtureRequest
) -> None:
    if kernel == "triton":
        request.getfixturevalue("interpreted")
    assert dense(text_of(3, causal(3))).tolist() == np.tri(3, dtype=bool).tolist()
    batch = Batch.from_rows(LEFT_TO_RIGHT, length=TILE, pad=0)
    qkv = torch.randn(3, TILE, 3 * 2 * 8)
    compare(batch, qkv, kernel, num_heads=2, window=window)
    if kernel == "plain":
        at = torch.arange(TILE)
        near = (at[:, None] - at).abs() <= (TILE if window is None else window)
        seen = (dense_of_rows(LEFT_TO_RIGHT, TILE) & near)[:, None]
        parts = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in qkv.chunk(3, -1))
        expected = F.scaled_dot_product_attention(*parts, attn_mask=seen)
        found = attend(qkv, plan_attention(batch, kernel), num_heads=2, window=window)
        torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("window", [3, 100])
def test_a_long_text_read_from_left_to_right_within_windows(window: int) -> None:
    """Of several tiles on a CPU."""
    length = 3 * TILE + 5
    batch = Batch.from_rows([[text_of(length, causal(length))]], length=length, pad=0)
    compare(batch, torch.randn(1, length, 3 * 2 * 4), "tiles", num_heads=2, window=window)
