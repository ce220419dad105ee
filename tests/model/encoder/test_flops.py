from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.flops import sequence_sums, training_flops
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.heads.pseudo_tokens import with_pseudo_tokens
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.multi_task_model import Model
from palm_ds.train.plan.work import work_of

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


def test_a_first_pass_that_fills_placeholders_counts() -> None:
    batch = replace(packed(16), visibility=torch.zeros(2, 1, 16, dtype=torch.int32))
    backbone = build_encoder(CONFIG)
    model = Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"}, {"words": 1.0})
    at = torch.arange(8, 15)
    filled = replace(batch, placeholders={"words": (at, torch.zeros(7, dtype=torch.int64))})
    more = float(training_flops(CONFIG, filled, ["words"]))
    more -= float(training_flops(CONFIG, batch, ["words"]))
    with FlopCounterMode(display=False) as counter:
        with_pseudo_tokens(backbone, model.labeled, {"words": 1.0}, filled)
    # The last layer is computed at the placeholders.
    assert 0.7 * more < counter.get_total_flops() < more
    step = work_of(model, [filled, batch], rows=2)
    both = sum(float(training_flops(CONFIG, each, ["words"])) for each in (filled, batch))
    assert step.flops(CONFIG) == pytest.approx(both)
    assert step.of_rows(6).flops(CONFIG) == pytest.approx(3 * both)
