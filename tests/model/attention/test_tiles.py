"""A window on a CPU: a long text costs what its windows cost, and computes what a mask does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palm_ds.model.attention import tiles
from palm_ds.model.attention.attention import attend, plan_attention
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.ops.dropout import dropout_keys

HEADS, SIZE = 2, 16


def batch(*rows: list[int]) -> Batch:
    texts = [
        [
            PackedText(input_ids=np.ones(n, np.int64), token_type_ids=np.zeros(n, np.int64))
            for n in row
        ]
        for row in rows
    ]
    made = Batch.from_rows(texts, length=max(sum(row) for row in rows), pad=0)
    made.dropout_key = 5
    return made


def output_and_gradient(
    kernel: str,
    texts: Batch,
    window: int | None,
    dropout: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shape = (*texts.input_ids.shape, 3 * SIZE)
    qkv = torch.randn(shape).to(dtype).requires_grad_()
    keys = dropout_keys(texts, shape[1]) if dropout else None
    plan = plan_attention(texts, kernel, keys=keys)
    out = attend(qkv, plan, num_heads=HEADS, dropout=dropout, window=window)
    weight = torch.arange(out.numel()).view(out.shape).sin()
    (grad,) = torch.autograd.grad((out * weight).sum(), qkv)
    return out, grad


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("window", [1, 20, 64, 128, 400])
@pytest.mark.parametrize("rows", [([700],), ([300, 30], [1, 129], [257]), ([128, 128], [512])])
def test_it_is_that_of_a_mask(rows: tuple[list[int], ...], window: int, dropout: float) -> None:
    texts = batch(*rows)
    found = output_and_gradient("tiles", texts, window, dropout)
    expected = output_and_gradient("plain", texts, window, dropout)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("window", [None, 20])
def test_tiles_of_one_size_are_computed_together(
    window: int | None, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, four at a time: each of the eight gives what it gives alone."""
    texts = batch([100, 28], [60, 68], [128], [30, 98], [128], [128], [128], [90, 38])
    counts = {}
    for count in (1, 4):
        monkeypatch.setattr(tiles, "_TOGETHER", count)
        plan = plan_attention(texts, "tiles")
        attend(torch.randn(8, 128, 3 * SIZE).bfloat16(), plan, num_heads=HEADS, window=window)
        counts[count] = [tile.texts for tile in plan.layer_tiles[window]]
    assert counts == {1: [1] * 8, 4: [4, 4]}
    together = output_and_gradient("tiles", texts, window, dropout, torch.bfloat16)
    monkeypatch.setattr(tiles, "_TOGETHER", 1)
    alone = output_and_gradient("tiles", texts, window, dropout, torch.bfloat16)
    masked = output_and_gradient("plain", texts, window, dropout, torch.bfloat16)
    for mine, its, expected in zip(together, alone, masked, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(mine, expected, atol=4e-2, rtol=4e-2)


def test_a_long_text_computes_the_scores_of_its_windows() -> None:
    plan = plan_attention(batch([4096]), "tiles")
    qkv = torch.randn(1, 4096, 3 * SIZE, requires_grad=True)
    attend(qkv, plan, num_heads=HEADS, window=64)
    assert [tile.tokens for tile in plan.tiles] == [4096]
    parts = plan.layer_tiles[64]
    scores = sum(tile.tokens * (tile.before + tile.tokens + tile.after) for tile in parts)
    assert sum(tile.tokens for tile in parts) == 4096
    assert scores < 4096 * (128 + 2 * 64) < 4096**2 / 15


@pytest.mark.parametrize("window", [None, 1, 20, 64, 400])
@pytest.mark.parametrize(
    "rows", [([30] * 5 + [17] * 3,), ([300, 300, 40],), ([60, 60], [60, 59]), ([700],)]
)
def test_predictions_attend_to_the_same(rows: tuple[list[int], ...], window: int | None) -> None:
    texts = batch(*rows)
    qkv = torch.randn(*texts.input_ids.shape, 3 * SIZE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plan, masked = plan_attention(texts, "tiles"), plan_attention(texts, "plain")
        found = attend(qkv, plan, num_heads=HEADS, window=window)
        expected = attend(qkv, masked, num_heads=HEADS, window=window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    runs = sum(len(list(run)) for row in rows for run in [dict.fromkeys(row)])
    assert len(plan.tiles) <= runs + len(rows)  # equal neighbors are one tile


def test_many_short_texts_of_all_lengths_are_joined() -> None:
    lengths = list(range(1, 20)) * 2
    with torch.no_grad():
        assert all(tile.texts == 1 for tile in plan_attention(batch(lengths), "tiles").tiles)
        assert plan_attention(batch(lengths[:10]), "tiles").kernel == "sdpa"
        assert [tile.texts for tile in plan_attention(batch([20] * 9), "tiles").tiles] == [9]
