"""A model that is shared out computes what it does whole. Several processes: tests/distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.transformer import TransformerEncoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.processes import start
from palm_ds.runtime.zero.sharded_modules import ShardedModules


class Scaled(TransformerEncoder):
    """With a parameter outside of its parts."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(batch, at) * self.scale


def test_its_weights_are_there_while_a_part_runs() -> None:
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
    backbone = Scaled(EncoderConfig(**sizes, max_positions=16))
    heads = {"mood": ClassHead(8, 3, pooled=True), "words": MaskedLMHead(backbone)}
    model = Model(backbone, heads, {name: name for name in heads}).eval().requires_grad_(False)
    ids = np.arange(12)
    text = PackedText(input_ids=ids, token_type_ids=np.zeros_like(ids))
    batch = Batch.from_rows([[text]], length=16, pad=0)
    batch.labels = {name: (torch.tensor([0, 5]), torch.tensor([1, 2])) for name in heads}
    whole = model(batch)
    parts = ShardedModules(model, start(make_ds_config({})))
    kept = {n for n, parameter in model.named_parameters() if parameter.numel()}
    assert kept == {"backbone.scale"}
    for name, output in model(batch).items():
        assert torch.equal(output.loss_sum, whole[name].loss_sum)
    assert kept == {n for n, parameter in model.named_parameters() if parameter.numel()}
    with parts.whole(heads["words"]):
        assert heads["words"].bias.shape == (30,) and backbone.word.weight.shape == (30, 8)
    assert not backbone.word.weight.numel()
