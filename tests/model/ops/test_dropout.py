"""Dropout: the rate, the gradient, and masks that depend on nothing but where a number is."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.ops.dropout import (
    DropoutKeys,
    add_dropout,
    dropout,
    dropout_keys,
    keep_mask,
    keep_rate,
    odd_bits,
)

ROWS, LENGTH, COLUMNS = 8, 256, 192


def batch_of(rows: int, length: int, first_row: int = 0, key: int | None = 7) -> Batch:
    text = PackedText(input_ids=np.zeros(1, np.int64), token_type_ids=np.zeros(1, np.int64))
    batch = Batch.from_rows([[text]] * rows, length=length, pad=0)
    batch.first_row, batch.dropout_key = first_row, key
    return batch


def keys_of(*given: int, key: int | None = 7) -> DropoutKeys:
    return dropout_keys(batch_of(*given, key=key), COLUMNS)


def mask_of(keys: DropoutKeys, rate: float = 0.1) -> torch.Tensor:
    return keys.mask(torch.empty(*keys.tokens.shape, COLUMNS), rate)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1000, 777)])
def test_keep_mask_has_the_rate(shape: tuple[int, int], rate: float) -> None:
    rows, columns = (odd_bits(torch.randint(2**62, (size,))) for size in shape)
    mask = keep_mask(rows, columns, rate, torch.float32)
    assert mask.shape == shape and set(mask.unique().tolist()) <= {0.0, 1.0}
    assert abs(keep_rate(rate) - (1 - rate)) < 1e-9
    if mask.numel() > 1000:
        error = (rate * (1 - rate) / mask.numel()) ** 0.5
        assert abs(mask.mean().item() - keep_rate(rate)) < 5 * error


@pytest.mark.parametrize("counter", [False, True])
def test_dropout(counter: bool) -> None:
    torch.manual_seed(1)
    keys = keys_of(1, 40) if counter else None
    x, y = torch.randn(1, 40, 60, requires_grad=True), torch.randn(1, 40, 60, requires_grad=True)
    out = add_dropout(x, y, 0.25, keys)
    upstream = torch.randn(1, 40, 60)
    out.backward(upstream)
    change = (out - x).detach()
    dropped = change == 0
    assert 0.15 < dropped.float().mean() < 0.35
    torch.testing.assert_close(change[~dropped], y.detach()[~dropped] / 0.75, atol=1e-5, rtol=1e-5)
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, upstream)
    torch.testing.assert_close(y.grad, torch.where(dropped, 0.0, upstream / 0.75))
    assert torch.equal(add_dropout(x, y, 0.0, keys), x + y)
    assert torch.equal(dropout(x, 0.0, keys), x)
    if counter:
        torch.testing.assert_close(dropout(y, 0.25, keys), out - x, atol=1e-6, rtol=1e-6)


def test_a_recomputed_layer_keeps_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is that of a mask that was kept, which is made a second time for it."""
    made, keep = [], DropoutKeys.mask

    def mask(keys: DropoutKeys, like: torch.Tensor, rate: float) -> torch.Tensor:
        result = keep(keys, like, rate)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(DropoutKeys, "mask", mask)
    torch.manual_seed(1)
    x, y = torch.randn(1, 40, 60), torch.randn(1, 40, 60, requires_grad=True)
    kept = add_dropout(x, y, 0.25, keys_of(1, 40))
    out = checkpoint(add_dropout, x, y, 0.25, keys_of(1, 40), use_reentrant=False)
    gc.collect()
    assert len(made) == 2 and made[1]() is None
    grads = [torch.autograd.grad(each.square().sum(), y)[0] for each in (kept, out)]
    assert len(made) == 3 and torch.equal(*grads)


def test_a_mask_depends_on_row_position_and_column_alone() -> None:
    """Other rows in the batch, and shorter ones, change nothing; nor does a part of the columns."""
    whole = mask_of(keys_of(4, 24).site(3))
    for first in range(4):
        assert torch.equal(mask_of(keys_of(1, 24, first).site(3))[0], whole[first])
        assert torch.equal(mask_of(keys_of(1, 8, first).site(3))[0], whole[first, :8])
    narrow = keys_of(4, 24).site(3).mask(torch.empty(4, 24, 50), 0.1)
    assert torch.equal(narrow, whole[..., :50])
    at = torch.tensor([5, 30, 30])
    assert torch.equal(mask_of(keys_of(4, 24).site(3).select(at)), whole.flatten(0, 1)[at])
    heads = keys_of(4, 24).of_heads(3).tokens.view(3, 4, 24)
    assert torch.equal(keys_of(1, 8, 2).of_heads(3).tokens, heads[:, 2, :8])


def test_masks_stay_the_same_for_ever() -> None:
    """A run that is resumed by a later version, or on another device, continues its curve."""
    keys = dropout_keys(batch_of(1, 2, first_row=3, key=12345678901234567890 >> 1), 16)
    found = keys.site(2).site(1).mask(torch.empty(1, 2, 16), 0.5).int()[0]
    assert ["".join(map(str, row)) for row in found.tolist()] == [
        "1001100001110100",
        "1011010100001010",
    ]


def test_without_a_key_torch_decides() -> None:
    torch.manual_seed(1)
    first, second = keys_of(1, 8, key=None).tokens, keys_of(1, 8, key=None).tokens
    torch.manual_seed(1)
    assert torch.equal(keys_of(1, 8, key=None).tokens, first) and not torch.equal(first, second)


def correlations(mask: torch.Tensor) -> torch.Tensor:
    """Between all pairs of columns of (n, columns), in standard errors of independent ones."""
    found = torch.corrcoef(mask.T) * math.sqrt(len(mask))
    size = len(found)
    return found[tuple(torch.triu_indices(size, size, 1))]


def test_masks_are_random() -> None:
    """Steps, layers, places, rows and columns are independent, as far as pairs of them show."""
    base = keys_of(ROWS, LENGTH)
    masks = {
        "itself": mask_of(base.site(1).site(1)),
        "place": mask_of(base.site(1).site(2)),
        "layer": mask_of(base.site(2).site(1)),
        "rows": mask_of(keys_of(ROWS, LENGTH, ROWS).site(1).site(1)),
        "step": mask_of(keys_of(ROWS, LENGTH, key=8).site(1).site(1)),
        "heads": mask_of(base.site(1).of_heads(2))[0],
    }
    numbers = {name: mask.flatten() for name, mask in masks.items()}
    count = numbers["itself"].numel()
    for name, kept in numbers.items():
        assert abs(kept.mean().item() - 0.9) < 5 * math.sqrt(0.09 / count), name
    assert correlations(torch.stack(list(numbers.values()), 1)).abs().max() < 5
    for lag in (1, 2, COLUMNS, LENGTH * COLUMNS):  # neighbors in a token, of a token, of a row
        pair = torch.stack([numbers["itself"][lag:], numbers["itself"][:-lag]], 1)
        assert correlations(pair).abs().max() < 5, lag
    flat = masks["itself"].flatten(0, 1)  # (tokens, columns)
    for pairs in (correlations(flat), correlations(flat.T)):
        assert pairs.std().item() == pytest.approx(1, abs=0.03)
        assert pairs.abs().max() < 7  # of 2 million


def test_dropout_keeps_the_mean() -> None:
    """Over many steps, the mean of what is left is the number itself."""
    x = torch.randn(1, 4, 16)
    out = torch.cat([dropout(x, 0.3, keys_of(1, 4, key=step)) for step in range(400)])
    error = x[0].abs() * math.sqrt(0.3 / 0.7 / 400)
    assert ((out.mean(0) - x[0]).abs() < 5 * error + 1e-6).all()
