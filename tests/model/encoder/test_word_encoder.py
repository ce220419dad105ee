"""Encoders without attention: packed rows, options, dropout, and their place in the registry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.check_custom_encoder import check_custom_encoder
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.flops import attention_flops, layer_flops
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from tests.helpers.word_encoders import KINDS, Texts, config, in_one_row, packed_text

LONG = Texts(12, 3, 7, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["softsign_sum", "mean", "max"])
def test_a_text_is_the_same_whatever_else_is_in_its_row(kind: str, pooling: str) -> None:
    encoder = build_encoder(config(kind, token_types=2, pooling=pooling))
    packed = encoder(in_one_row(LONG))[0]
    assert packed.isfinite().all()
    for start, ids in LONG.starts():
        alone = Batch.from_rows([[packed_text(ids)]], length=len(ids), pad=0)
        torch.testing.assert_close(encoder(alone)[0], packed[start : start + len(ids)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_of_encoders_holds(kind: str) -> None:
    check_custom_encoder(config(kind, token_types=3, embedding_size=4))
    check_custom_encoder(config(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_token_types_distinguish_texts(kind: str) -> None:
    encoder = build_encoder(config(kind, token_types=2))
    ids = torch.arange(5, 11)
    one, other = (
        encoder(Batch.from_rows([[packed_text(ids, segments)]], length=6, pad=0))[0, 0]
        for segments in ((0, 0, 0, 1, 1, 1), (1, 1, 1, 0, 0, 0))
    )
    if kind == "bag_of_words":  # a bag: only their numbers count
        torch.testing.assert_close(one, other)
    else:
        assert (one - other).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_follows_from_the_place_and_recomputation_changes_nothing(kind: str) -> None:
    numbers = config(kind, dropout=0.3)
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        encoder = build_encoder(numbers, Kernels(dropout="counter"), recompute=recompute)
        batch = in_one_row(LONG).with_dropout_key(5)
        out = encoder(batch)
        out.square().sum().backward()
        results.append([out, encoder.word.weight.grad, encoder(batch.with_dropout_key(6))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    first, _, another = results[0]
    assert not torch.equal(first, another)


@pytest.mark.parametrize("tied", [True, False])
def test_a_masked_lm_head_fits_embeddings_of_another_width(tied: bool) -> None:
    encoder = build_encoder(config("cnn", embedding_size=6, tie_word_embeddings=tied))
    head = MaskedLMHead(encoder)
    assert head.logits(torch.zeros(3, 16)).shape == (3, 30)
    assert head.output_embeddings.shape == (30, 6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"pooling": "men"}, "options.pooling: no .men.; did you mean .mean."),
        ({"embedding_size": -1}, "backbone.options.embedding_size: expected 0 or more, got -1"),
        ({"task_types": 3}, "task_types: 3, but cnn has no task embedding; set 0"),
        ({"windws": [2]}, 'options.windws: unknown key; did you mean "windows"'),
    ],
)
def test_bad_options(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        build_encoder(config("cnn", **values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("embedding_size", [6, 16])
def test_flops_count_the_weights_of_the_layers(kind: str, embedding_size: int) -> None:
    layers = 1 if kind == "bag_of_words" else 2
    options: dict[str, Any] = {"windows": [2, 3]} if kind == "cnn" else {}
    numbers = config(kind, num_layers=layers, embedding_size=embedding_size, **options)
    weights = [p.numel() for p in build_encoder(numbers).layers.parameters() if p.ndim == 2]
    assert layer_flops(numbers) == 6 * sum(weights) and attention_flops(numbers) == 0


def test_tokens_that_see_only_some_of_the_others_need_attention() -> None:
    with pytest.raises(UserError, match="backbone.kind: cnn reads whole texts; tasks whose tokens"):
        check_custom_encoder(config("cnn"), ["titles"])


def test_half_precision() -> None:
    for kind in KINDS:
        encoder = build_encoder(config(kind)).to(torch.bfloat16)
        out = encoder(in_one_row(LONG))
        assert out.dtype == torch.bfloat16 and out.isfinite().all()
        exact = build_encoder(replace(encoder.config))
        exact.load_state_dict({x: y.float() for x, y in encoder.state_dict().items()})
        torch.testing.assert_close(out.float(), exact(in_one_row(LONG)), atol=0.02, rtol=0.02)
