"""Our attention kernels in Triton's interpreter, against the plain attention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from palm_ds.model.attention.attention import attend, plan_attention
from palm_ds.model.attention.triton import packed_backward, packed_forward, sequence_bounds
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.dropout import dropout_keys
from tests.model.attention.test_attention import batch_of, compare

ROOT = Path(__file__).resolve().parents[3]
MIXED = [[40, 1, 1, 3], [10], []]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# rows, their length, heads, size of a head, dtype, window, dropout
CASES = [
    *(
        (*shape, FP32, None, dropout)
        for dropout in (0.0, 0.3)
        for shape in (
            ([[7]], 7, 1, 3),
            ([[1]], 1, 1, 1),
            ([[3, 1, 4], [1, 5], []], 9, 2, 5),
            ([[33, 1, 1, 30], [65, 2]], 67, 1, 20),
        )
    ),
    (MIXED, 50, 2, 64, BF16, None, 0.1),
    (MIXED, 50, 2, 80, FP16, 5, 0.1),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            (MIXED, 50, 2, 16, FP32, 0, 0.1),
            (MIXED, 50, 2, 64, FP16, 5, 0.1),
            (MIXED, 50, 2, 80, FP16, None, 0.1),
            (MIXED, 50, 2, 96, BF16, 30, 0.1),
            (MIXED, 50, 2, 128, FP32, 1_000, 0.1),
        )
    ),
]

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    ("rows", "length", "heads", "head_size", "dtype", "window", "dropout"), CASES
)
def test_triton_equals_the_plain_form(
    rows: list[list[int]],
    length: int,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    window: int | None,
    dropout: float,
) -> None:
    batch = batch_of(rows, length)
    qkv = torch.randn(len(rows), length, 3 * heads * head_size).to(dtype)
    keys = dropout_keys(batch, length) if dropout else None
    compare(batch, qkv, "triton", keys, num_heads=heads, dropout=dropout, window=window)


def test_triton_drops_exactly_what_plain_attention_drops() -> None:
    """Equal queries and keys give equal weights, and a value of one token shows which weights of it
    are dropped."""
    batch, heads = batch_of([[70], [40, 30]], 70), 2
    batch.dropout_key, batch.first_row = 2**62 + 1, 5
    keys = dropout_keys(batch, 70)
    for token in (0, 69):
        qkv = torch.zeros(2, 70, 3, heads, 1)
        qkv[:, token, 2] = 1
        kept = [
            attend(
                qkv.flatten(2), plan_attention(batch, form, keys=keys), num_heads=heads, dropout=0.4
            )
            for form in ("plain", "triton")
        ]
        assert torch.equal(kept[0] > 0, kept[1] > 0)
        assert 0.5 < (kept[0][0] > 0).float().mean() < 0.7


def test_an_encoder_learns_the_same_with_triton_and_plain_attention() -> None:
    """With dropout everywhere: every layer and head has the same masks in both."""
    config = EncoderConfig(
        vocab_size=50, hidden_size=32, num_heads=2, num_layers=2, intermediate_size=64
    )
    rows = [[text_of(9), text_of(1), text_of(12)], [text_of(20)]]
    batch = replace(Batch.from_rows(rows, length=25, pad=0), dropout_key=11, first_row=3)
    results = []
    for attention in ("plain", "triton"):
        torch.manual_seed(0)
        encoder = build_encoder(config, Kernels(attention=attention, dropout="counter")).train()
        out = encoder(batch)
        out.square().mean().backward()
        used = [p.grad for p in encoder.parameters() if p.grad is not None]
        results.append([out.detach(), *used])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain)


def text_of(size: int) -> PackedText:
    return PackedText(
        input_ids=np.arange(size, dtype=np.int64), token_type_ids=np.zeros(size, np.int64)
    )


def test_a_layer_of_the_kernels_is_one_graph() -> None:
    batch = batch_of([[3, 2], [4]], 5)
    plan = plan_attention(batch, "triton", keys=dropout_keys(batch, 5))
    qkv = torch.randn(2, 5, 3 * 8)
    layer = lambda x: attend(x * 2, plan, num_heads=2, dropout=0.2).relu()  # noqa: E731
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for each in (layer, compiled):
        x = qkv.clone().requires_grad_()
        out = each(x)
        out.sum().backward()
        results.append((out.detach(), x.grad))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager)


def test_the_operators_have_the_shapes_that_they_promise() -> None:
    batch = batch_of([[3, 2], [4]], 5)
    parts, visibility = torch.randn(10, 3, 2, 4), torch.zeros(2, 10, dtype=torch.int32)
    hashes, columns = dropout_keys(batch, 5).tokens.flatten(), torch.ones(10, dtype=torch.int32)
    ahead, options = (parts, sequence_bounds(batch), visibility), (0.1, 2)
    torch.library.opcheck(packed_forward, (*ahead, hashes, columns, *options))
    out, sums, row_hashes = packed_forward(*ahead, hashes, columns, *options)
    back = (torch.randn_like(out), *ahead, row_hashes, columns, out, sums, *options)
    torch.library.opcheck(packed_backward, back)


def test_all_kernels_are_in_tritons_language(tmp_path: Path) -> None:
    """Those of `fused_norm` too. The interpreter accepts more than the compiler does."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.triton_language"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert len(lines) == 9 and min(lines.values()) > 100, lines


@pytest.mark.exhaustive  # and on a card in all tests of the kernels
def test_the_kernels_compile_for_a_card_that_is_not_here(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.compile_attention"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert len(made) == 3
    for each in made:
        assert each["code"] > 0 and each["shared"] <= 99 * 1024, each
