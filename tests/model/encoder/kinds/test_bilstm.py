"""The LSTM encoder against torch's LSTM on each text by itself."""

from __future__ import annotations

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import build_encoder
from tests.helpers.word_encoders import TEXTS, config, in_one_row


def test_each_text_is_read_by_itself() -> None:
    encoder = build_encoder(config("bilstm", num_layers=2, embedding_size=6, pooling="max"))
    out = encoder(in_one_row(TEXTS))[0]
    for start, ids in TEXTS.starts():
        x = encoder.word.weight[ids]
        for layer in encoder.layers:
            x = layer.lstm(x)[0]  # type: ignore[operator,union-attr]
        torch.testing.assert_close(out[start], x.amax(0))
        torch.testing.assert_close(out[start + 1 : start + len(ids)], x[1:])


def test_an_odd_hidden_size_is_refused() -> None:
    with pytest.raises(UserError, match="hidden_size: 15 is odd; a bilstm halves it"):
        build_encoder(config("bilstm", hidden_size=15))
