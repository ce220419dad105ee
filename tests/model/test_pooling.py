"""One vector of a text from those of its tokens: packed, padded, and by definition."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.model.pooling import (
    POOLINGS,
    Pooling,
    TextPooling,
    first_tokens,
    pool,
    pool_padded,
)

LENGTHS = (3, 1, 5)
DEFINITIONS = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "max": lambda x: x.max(0).values}


@pytest.fixture
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, 4, generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_packed_texts_are_pooled_by_definition(pooling: str, texts: list[torch.Tensor]) -> None:
    found = pool(torch.cat(texts), torch.tensor(LENGTHS), pooling)
    torch.testing.assert_close(found, torch.stack([DEFINITIONS[pooling](x) for x in texts]))


def test_sums_of_half_precision_are_those_of_fp32(texts: list[torch.Tensor]) -> None:
    flat = torch.cat(texts).bfloat16()
    found = pool(flat, torch.tensor(LENGTHS), "mean")
    assert found.dtype == torch.float32
    assert torch.equal(found, pool(flat.float(), torch.tensor(LENGTHS), "mean"))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_does_not_count(
    pooling: str, normalize: bool, left: bool, texts: list[torch.Tensor]
) -> None:
    """Whatever its vectors are, and on either side."""
    most = max(LENGTHS)
    sides = [(most - n, 0) if left else (0, most - n) for n in LENGTHS]
    padded = [F.pad(x, (0, 0, *side), value=99.0) for x, side in zip(texts, sides, strict=True)]
    real = torch.stack(
        [
            F.pad(torch.ones(n, dtype=torch.bool), side)
            for n, side in zip(LENGTHS, sides, strict=True)
        ]
    )
    how = Pooling(pooling=pooling, normalize=normalize)
    found = pool_padded(torch.stack(padded), real, how)
    wanted = pool(torch.cat(texts), torch.tensor(LENGTHS), pooling)
    torch.testing.assert_close(found, F.normalize(wanted, dim=1) if normalize else wanted)
    first = first_tokens(torch.stack(padded), real)
    assert torch.equal(first, torch.stack([x[0] for x in texts]))


def test_an_unknown_pooling_is_refused_wherever_it_is_named() -> None:
    for make in (Pooling, TextPooling, EmbeddingSettings):
        with pytest.raises(UserError, match="^pooling: no .maen.; did you mean .mean"):
            make(pooling="maen")
    with pytest.raises(UserError, match="^pooling: no .pooler."):
        Pooling(pooling="pooler")  # heads and exports have none
    assert EmbeddingSettings(pooling="pooler").pooling == "pooler"


def test_a_description_of_a_graph_has_three_facts() -> None:
    """As readers of palm_ds_onnx.json know them."""
    assert list(asdict(Pooling())) == ["pooling", "normalize", "max_length"]
