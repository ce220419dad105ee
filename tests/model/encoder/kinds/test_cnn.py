"""The convolutional encoder against torch's own convolution and pooling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import build_encoder
from tests.helpers.word_encoders import TEXTS, config, in_one_row


def by_torch(encoder: Any, ids: torch.Tensor, windows: list[int], pool: int) -> torch.Tensor:
    """The vectors (tokens, hidden) of one text before its text vector."""
    x = encoder.word.weight[ids].T[None]  # (1, width, tokens)
    for layer in encoder.layers:
        found = []
        for window, part in zip(windows, layer.convolutions, strict=True):
            kernel = part.weight.view(len(part.weight), window, -1).transpose(1, 2)
            before = (window - 1) // 2
            found.append(F.conv1d(F.pad(x, (before, window - 1 - before)), kernel, part.bias))
        x = F.relu(torch.cat(found, 1))
        before = (pool - 1) // 2
        padded = F.pad(x, (before, pool - 1 - before), value=-torch.inf)
        x = F.max_pool1d(padded, pool, stride=1)
    return x[0].T


@pytest.mark.parametrize(
    ("windows", "pool", "num_layers"), [([3], 3, 1), ([2, 5], 1, 2), ([1, 4], 2, 1)]
)
def test_it_computes_what_torch_computes(windows: list[int], pool: int, num_layers: int) -> None:
    numbers = config("cnn", num_layers=num_layers, windows=windows, pool=pool)
    encoder = build_encoder(numbers)
    out = encoder(in_one_row(TEXTS))[0]
    for start, ids in TEXTS.starts():
        expected = by_torch(encoder, ids, windows, pool)
        torch.testing.assert_close(out[start], F.softsign(expected.sum(0)))
        torch.testing.assert_close(out[start + 1 : start + len(ids)], expected[1:])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"windows": [3, 0]}, r"backbone.options.windows.1: expected a number above 0, got 0"),
        ({"windows": 3}, "options.windows: expected a list, got 3"),
        ({"pool": "2"}, 'options.pool: expected a whole number, got "2"'),
        ({"windows": [1, 2, 3]}, "3 windows do not divide the hidden_size 16"),
    ],
)
def test_bad_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        build_encoder(config("cnn", **options))
