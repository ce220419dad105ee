"""The size of a micro-batch on GPUs where the DeepSpeed file leaves it open ("auto")."""

from __future__ import annotations

from dataclasses import replace

import torch

from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.processes.processes import Processes
from palm_ds.train.plan.memory import plan_memory
from palm_ds.train.plan.work import ModelSize, StepWork, size_of, vocab_tasks

_TOKENS = 32_768
"""Larger products are hardly faster (docs/scaling.md)."""
_SHARE = 0.5
"""Of a GPU's memory; the prediction leaves out fragmentation, CUDA, NCCL and teachers."""
_MASKED = 0.25
"""Tokens that go through a masked-LM head, at most, in usual recipes."""


def choose_micro_batch(
    config: DSConfig, model: Model, processes: Processes, *, rows: int, length: int
) -> DSConfig:
    """`config` with the rows of a micro-batch, for steps of `rows` packed rows on GPUs. On CPUs,
    for encoders that no plan knows, and if the file gives a number, it is as it was. Collective."""
    known = encoder_class(model.backbone.config).is_specified()
    if processes.device.type != "cuda" or not known:
        return config
    memory = torch.cuda.get_device_properties(processes.device).total_memory
    masked = _MASKED * bool(vocab_tasks(model))
    work = StepWork(
        rows=rows, length=length, tokens=rows * length, squares=0, labels=masked * rows * length
    )
    smallest = min(processes.gather(memory))
    return fit_micro_batch(config, size_of(model), work, processes.world, smallest)


def fit_micro_batch(
    config: DSConfig, model: ModelSize, work: StepWork, world: int, memory: int
) -> DSConfig:
    """The largest micro-batch of at most 32,768 tokens that is predicted to leave half of `memory`
    bytes free; never a smaller one than without a GPU. Raises UserError if the rows cannot be
    divided among the processes."""
    if config.micro_rows:
        return config
    for most in range(_TOKENS // work.length, config.most_micro_rows, -1):
        chosen = replace(config, most_micro_rows=most)
        if plan_memory(model, work, chosen, world=world).total <= _SHARE * memory:
            return chosen
    return config
