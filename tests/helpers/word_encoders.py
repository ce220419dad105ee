"""Small encoders that are not transformers, and a row of three texts to run them on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.inputs.batch import Batch, PackedText

KINDS = ("bag_of_words", "cnn", "bilstm")


class Texts:
    """Random texts of these lengths."""

    def __init__(self, *lengths: int):
        rng = np.random.default_rng(0)
        self.ids = [torch.from_numpy(rng.integers(5, 30, length)) for length in lengths]

    def starts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Where each begins in a row of all of them, and its ids."""
        start = 0
        for ids in self.ids:
            yield start, ids
            start += len(ids)


TEXTS = Texts(5, 9, 1)


def in_one_row(texts: Texts, padding: int = 4) -> Batch:
    packed = [packed_text(ids) for ids in texts.ids]
    return Batch.from_rows([packed], length=sum(map(len, texts.ids)) + padding, pad=0)


def packed_text(ids: torch.Tensor, segments: Sequence[int] = ()) -> PackedText:
    types = np.array(segments) if segments else np.zeros(len(ids), np.int64)
    return PackedText(input_ids=ids.numpy(), token_type_ids=types)


def config(kind: str, **values: Any) -> EncoderConfig:
    """Hyperparameters, and options of the kind."""
    fields = EncoderConfig.__dataclass_fields__
    own = {key: value for key, value in values.items() if key in fields}
    options = {key: value for key, value in values.items() if key not in fields}
    return EncoderConfig.from_dict(
        {"kind": kind, "vocab_size": 30, "hidden_size": 16, "options": options} | own
    )
