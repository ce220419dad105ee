"""Bytes of the tensors that this process holds, before and after an optimizer step."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from palm_ds.engine import Engine
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from tests.distributed.tiny import LENGTH, LR, OPTIMIZER, ROWS, SEED, WORDS, share

BUCKET = 1000


def larger_model() -> Model:
    """So large that its states outweigh the batches."""
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=WORDS, hidden_size=192, num_layers=4, num_heads=4, max_positions=LENGTH
    )
    backbone = build_encoder(config)
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(192, 3, pooled=True)}
    return Model(backbone, heads, {name: name for name in heads})


def held() -> int:
    """Waits a moment: gloo's threads let go of what they reduced some time after it is reduced."""
    return min(_held_after(seconds) for seconds in (0, 0.1, 0.1, 0.1, 0.1))


def _held_after(seconds: float) -> int:
    time.sleep(seconds)
    gc.collect()
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):
            for tensor in (each, each.grad):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def measure(stage: int, precision: str, accumulation: int) -> dict[str, int]:
    sizes = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    sizes |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_param_persistence_threshold": 10}
    values: dict[str, Any] = {"zero_optimization": {"stage": stage, **(sizes if stage else {})}}
    values |= {} if precision == "fp32" else {precision: {"enabled": True}}
    values["train_micro_batch_size_per_gpu"] = ROWS // 2 // accumulation
    before, model = held(), larger_model()
    found = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    ds_config = make_ds_config(values)
    engine = Engine(model, ds_config=ds_config, optimizer=OPTIMIZER, rows=ROWS, seed=SEED)
    step: Any = engine._engine.step

    def counted() -> None:
        found["before"] = held() - before  # of the last micro-batch
        step()

    for number in range(2):
        engine._engine.step = counted if number else step  # the first one makes Adam's states
        batches = share(number, engine.rank, engine.world, engine.micro_rows)
        engine.step(batches, LR, number)
    engine._engine.step = step
    found["between"] = held() - before
    engine.release()
    return found


def all_cases(cases: list[tuple[int, str, int]]) -> dict[str, dict[str, int]]:
    return {" ".join(map(str, case)): measure(*case) for case in cases}
