"""The bag of words is ERNIE's: softsign of a sum, tanh of a linear map."""

from __future__ import annotations

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import build_encoder
from tests.helpers.word_encoders import TEXTS, config, in_one_row


def test_the_text_vector_is_the_released_models() -> None:
    encoder = build_encoder(config("bag_of_words"))
    out = encoder(in_one_row(TEXTS))[0]
    for start, ids in TEXTS.starts():
        words = encoder.word.weight[ids]
        total = words.sum(0)
        torch.testing.assert_close(out[start], total / (1 + total.abs()))
        torch.testing.assert_close(out[start + 1 : start + len(ids)], words[1:])
    pooled = encoder.pooler(out[:1])
    dense = encoder.pooler.dense
    torch.testing.assert_close(pooled, (out[:1] @ dense.weight.T + dense.bias).tanh())


def test_another_width_of_the_words() -> None:
    encoder = build_encoder(config("bag_of_words", embedding_size=6))
    assert encoder.word.weight.shape == (30, 6) and encoder(in_one_row(TEXTS)).shape[-1] == 16


def test_it_has_one_layer() -> None:
    with pytest.raises(UserError, match="backbone.num_layers: 2, but a bag of words has 1"):
        build_encoder(config("bag_of_words", num_layers=2))
