"""How micro-batches come from the processes that build them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.train.loop.prefetch import _OneTensor


def batch_of(*lengths: int) -> Batch:
    texts = [
        PackedText(input_ids=np.arange(n), token_type_ids=np.ones(n, np.int64)) for n in lengths
    ]
    made = Batch.from_rows([texts, []], length=sum(lengths) + 3, pad=0)
    made.labels["words"] = (torch.tensor([0, 2, 1]), torch.tensor([[5], [7], [9]]))
    made.labels["none"] = (torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    made.labels["scores"] = (torch.tensor([1]), torch.tensor([0.3], dtype=torch.float16))
    made.groups["words"] = torch.tensor([0, 0, 1])
    made.first_row, made.dropout_key = 4, 11
    return made


def tensors(batch: Batch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    batch.map(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def test_micro_batches_travel_as_one_tensor_and_arrive_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.numel()) or tensor.clone()
    )
    sent = [batch_of(5), batch_of(3, 1)]
    packed = _OneTensor.of(sent).pin_memory()
    assert pinned == [packed.data.numel()]
    for before, after in zip(sent, packed.batches(), strict=True):
        pairs = list(zip(tensors(before), tensors(after), strict=True))
        assert len(pairs) == 13
        for old, new in pairs:
            assert (old.dtype, old.shape) == (new.dtype, new.shape)
            assert torch.equal(old, new)
            assert new.data_ptr() % 16 == packed.data.data_ptr() % 16 or not new.numel()
        assert (after.first_row, after.dropout_key) == (4, 11)
        assert after.labels.keys() == before.labels.keys()
