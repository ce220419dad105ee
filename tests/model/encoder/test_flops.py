from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.flops import sequence_sums, training_flops
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.multi_task_model import Model

CONFIG = EncoderConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, max_positions=16, dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip


def packed(*lengths: int, length: int = 16) -> Batch:
    """One row."""
    texts = [
        PackedText(input_ids=np.ones(n, np.int64), token_type_ids=np.zeros(n, np.int64))
        for n in lengths
    ]
    return Batch.from_rows([texts], length=length, pad=0)


def test_sequences_count_by_themselves_and_padding_does_not() -> None:
    tokens, squares = sequence_sums(packed(5, 7))
    assert (float(tokens), float(squares)) == (12, 25 + 49)


def test_empty_sequences_at_the_end_change_nothing() -> None:
    batch = packed(5, 7)
    end = batch.cu_seqlens[-1:].expand(6)
    longer = replace(batch, cu_seqlens=torch.cat([batch.cu_seqlens, end]))
    assert sequence_sums(longer) == sequence_sums(batch)


def test_it_counts_what_torch_counts() -> None:
    """One sequence that fills the row; torch counts all products with plain kernels."""
    batch = packed(16)
    batch.labels["words"] = (torch.tensor([0, 3, 9]), torch.tensor([1, 2, 3]))
    backbone = build_encoder(CONFIG)
    model = Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"})
    ours = float(training_flops(CONFIG, batch, ["words"]))
    with FlopCounterMode(display=False) as counter:
        outputs = model(batch)
        outputs["words"].loss_sum.backward()
    # The last layer is computed at the labels, and the pooler at one row.
    assert 0.6 * ours < counter.get_total_flops() < ours
    with FlopCounterMode(display=False) as counter:
        backbone(batch).sum().backward()
    layers = float(training_flops(CONFIG, batch, []))
    assert counter.get_total_flops() == pytest.approx(layers, rel=1e-9)
