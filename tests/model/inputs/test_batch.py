from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.visibility import full


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_of(each)]
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_every_tensor_is_moved_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fields a batch has."""
    text = PackedText(
        input_ids=np.arange(3), token_type_ids=np.zeros(3, np.int64), visibility=full(3)
    )
    batch = Batch.from_rows([[text], []], length=4, pad=0)
    at = torch.tensor([0, 2])
    batch.labels["a"] = (at, at + 1)
    batch.groups["a"] = torch.tensor([0, 0])
    batch.first_row, batch.dropout_key = 7, 8

    meta = batch.to("meta")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 100)
    pinned = batch.pin_memory()
    count = 0
    for one in fields(batch):
        before, moved, after = (getattr(b, one.name) for b in (batch, meta, pinned))
        tensors = tensors_of(before)
        assert [t.device.type for t in tensors_of(moved)] == ["meta"] * len(tensors)
        for old, new in zip(tensors, tensors_of(after), strict=True):
            assert torch.equal(new, old + 100)
        count += len(tensors)
        if not tensors:
            assert before == moved == after, one.name
    assert count == 10
