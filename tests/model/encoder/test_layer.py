"""Rows of any shape, in every form of attention: finite, with finite gradients, and what the plain
form computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder, encoder_class
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.kernels import Kernels
from tests.helpers.small_encoders import small_transformer

KINDS = ("bert", "modernbert", "eurobert", "neobert", "mpnet", "deberta_v2")
"""One of each form of layer."""
LENGTHS = (1, 2, 3, 7, 16, 33, 48)
ROWS = 20
FUZZ = bool(os.environ.get("PALM_FUZZ"))  # other shapes every time


def config_of(kind: str, attention_dropout: float) -> EncoderConfig:
    rates = {"dropout": 0.1, "attention_dropout": attention_dropout}
    return small_transformer(kind, **rates, **({"num_layers": 3} if kind == "modernbert" else {}))


def sizes_of_row(rng: np.random.Generator, length: int) -> Iterator[int]:
    """Of its texts: none, single tokens, or anything, up to the length or not."""
    longest = int(rng.choice([0, 1, 5, length]))
    while longest and length and rng.random() < 0.9:
        size = int(rng.integers(1, min(longest, length) + 1))
        length -= size
        yield size


def random_batch(number: int, rows: int = ROWS) -> Batch:
    rng = np.random.default_rng(None if FUZZ else number)
    length = LENGTHS[number % len(LENGTHS)]
    packed = [
        [
            PackedText(input_ids=rng.integers(3, 64, n), token_type_ids=np.zeros(n, np.int64))
            for n in sizes_of_row(rng, length)
        ]
        for _ in range(rows)
    ]
    return replace(Batch.from_rows(packed, length=length, pad=0), dropout_key=number)


def computed(config: EncoderConfig, form: str, batches: list[Batch]) -> list[list[torch.Tensor]]:
    """Of each batch the output, and the gradients of all parameters in one."""
    torch.manual_seed(0)
    encoder = build_encoder(config, Kernels(attention=form, dropout="counter")).train()
    used = [x for name, x in encoder.named_parameters() if not name.startswith("pooler.")]
    found = []
    for batch in batches:
        out = encoder(batch)
        weighted = (out * torch.arange(out.numel()).view(out.shape).sin()).sum()
        gradients = torch.autograd.grad(weighted, used)
        found.append([out.detach(), torch.cat([x.flatten() for x in gradients])])
    return found


def check(config: EncoderConfig, form: str, batches: list[Batch]) -> None:
    pairs = zip(*(computed(config, x, batches) for x in ("plain", form)), strict=True)
    for batch, (expected, found) in zip(batches, pairs, strict=True):
        for plain, other in zip(expected, found, strict=True):
            assert plain.isfinite().all() and other.isfinite().all(), batch.sequence_ids
            scale = plain.abs().max().clamp(min=1)
            torch.testing.assert_close(other / scale, plain / scale, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("form", "attention_dropout"), [("sdpa", 0.0), ("tiles", 0.1)])
def test_200_rows(kind: str, form: str, attention_dropout: float) -> None:
    config = config_of(kind, attention_dropout)
    if form != "sdpa" and encoder_class(config).adds_to_scores(config):
        form = "plain"
    check(config, form, [random_batch(n) for n in range(200 // ROWS)])


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_rows_by_our_own_kernels() -> None:
    """60 of short texts, as the interpreter takes long; 200 with PALM_FUZZ."""
    config = replace(config_of("modernbert", 0.1), num_layers=2, num_heads=2)
    options = {"window": 2, "global_every": 2}
    numbers = [n for n in range(14 if FUZZ else 3) if LENGTHS[n % len(LENGTHS)] <= 16]
    check(replace(config, options=options), "triton", [random_batch(n) for n in numbers])
