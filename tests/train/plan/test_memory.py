"""The prediction against what a CPU can count: tensors kept for the backward pass, and the states
that DeepSpeed holds (with two processes in distributed/)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.train.plan.memory import (
    activation_bytes,
    buffer_bytes,
    plan_memory,
    state_bytes,
)
from palm_ds.train.plan.work import size_of, work_of

CONFIG = EncoderConfig(
    vocab_size=600,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    max_positions=128,
    task_types=0,
    dropout=0.0,
    attention_dropout=0.0,
)
LABELS = 19
KERNELS = Kernels(attention="sdpa", masked_lm_loss="chunked")


def build(config: EncoderConfig, *, recompute: bool = False) -> Model:
    backbone = build_encoder(config, KERNELS, recompute=recompute)
    return Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"})


def make_batch(rows: int, length: int) -> Batch:
    """One sequence in each row."""
    rng, made = np.random.default_rng(0), []
    for _ in range(rows):
        ids = rng.integers(5, 600, length)
        zeros = np.zeros(length, np.int64)
        example = Example(
            input_ids=ids, token_type_ids=zeros, source_offsets=np.arange(length), annotations={}
        )
        example.labels["words"] = (np.arange(LABELS), ids[:LABELS].copy())
        made.append([(example, 0)])
    return collate(made, length=length, pad=0)


def kept_bytes(model: Model, batch: Batch) -> int:
    """The storages that autograd keeps, without the weights and the batch."""
    tensors = [*model.parameters(), *(x for x in vars(batch).values() if torch.is_tensor(x))]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs: Any = model(batch)
    assert outputs["words"].loss_sum.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "length"), [(4, 64), (8, 128)])
def test_activations_are_as_predicted(dtype: torch.dtype, rows: int, length: int) -> None:
    """sdpa on a CPU keeps what FlashAttention keeps, and a mask of the layer's type besides."""
    batch = make_batch(rows, length)
    tokens, size = rows * length, dtype.itemsize
    found = kept_bytes(build(CONFIG).to(dtype), batch)
    mask = tokens * length  # bytes; in half precision each layer has one of its own type
    mask += CONFIG.num_layers * tokens * length * size if size == 2 else 0
    predicted = activation_bytes(CONFIG, size, tokens=tokens, labels=rows * LABELS)
    assert found - mask == pytest.approx(predicted, rel=0.1)


def test_recomputation_keeps_the_input_of_each_layer() -> None:
    tokens = 512
    whole = activation_bytes(CONFIG, 2, tokens=tokens, labels=0)
    less = activation_bytes(CONFIG, 2, tokens=tokens, labels=0, recompute=True)
    deep = replace(CONFIG, num_layers=24)
    assert less < whole
    each = activation_bytes(deep, 2, tokens=tokens, labels=0, recompute=True) - less
    assert each == pytest.approx(20 * tokens * CONFIG.hidden_size * 2)


def ds_config(stage: int, precision: str, **zero: Any) -> DSConfig:
    values: dict[str, Any] = {"zero_optimization": {"stage": stage, **zero}}
    if precision != "fp32":
        values[precision] = {"enabled": True}
    return make_ds_config(values)


@pytest.mark.parametrize(
    ("stage", "precision", "wanted"),
    [
        (0, "fp32", (4, 4, 8)),
        (1, "fp32", (4, 1, 3)),
        (1, "bf16", (2, 0.5, 3)),
        (2, "bf16", (2, 0.5, 3)),
        (3, "bf16", (0.5, 0.5, 3)),
        (3, "fp32", (1, 1, 3)),
    ],
)
def test_states_by_stage(stage: int, precision: str, wanted: tuple[float, ...]) -> None:
    """Bytes of a parameter, on each of four processes."""
    found = state_bytes(1000, ds_config(stage, precision), 4)
    assert tuple(found.values()) == tuple(1000 * each for each in wanted)


def test_an_offloaded_optimizer_takes_no_memory_of_the_gpu() -> None:
    config = ds_config(2, "bf16", offload_optimizer={"device": "cpu"})
    assert state_bytes(1000, config, 4) == {"weights": 2000, "gradients": 0, "optimizer": 0}


def test_buckets_take_their_size_whatever_the_model_is() -> None:
    size = size_of(build(CONFIG))
    assert buffer_bytes(size, ds_config(1, "bf16"), 8) == 1e9
    assert buffer_bytes(size, ds_config(2, "bf16", overlap_comm=True), 8) == 2e9
    small = ds_config(2, "bf16", reduce_bucket_size=1000)
    assert buffer_bytes(size, small, 8) == 2000
    assert buffer_bytes(size, ds_config(0, "fp32"), 1) == 0


def test_a_plan_is_for_one_micro_batch() -> None:
    model = build(CONFIG)
    work = work_of(model, [make_batch(2, 64)], rows=32)
    assert (work.tokens, work.squares, work.labels) == (32 * 64, 32 * 64**2, 32 * LABELS)
    config = ds_config(1, "bf16")
    few = plan_memory(size_of(model), work, config, world=4)
    assert few.activations == activation_bytes(CONFIG, 2, tokens=8 * 64, labels=8 * LABELS)
    assert few.total > few.states + few.buffers + few.activations
