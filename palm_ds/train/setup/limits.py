"""Limits of the machine, checked before anything is built: memory and disk space, and the size of a
micro-batch on GPUs where the DeepSpeed file leaves it open ("auto").
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from palm_ds.common.errors import UserError
from palm_ds.common.messages import byte_size, counted
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.full_disk import at_rank0, error_of
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.processes.processes import Processes
from palm_ds.train.plan.memory import plan_memory
from palm_ds.train.plan.work import ModelSize, StepWork, size_of, vocab_tasks
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.recipe.sections import SPIKE_MARGIN
from palm_ds.train.setup.run_folder import RunSpec

log = logging.getLogger(__name__)
_TOKEN_BYTES = 40  # five int64 tensors of a batch


def check_memory(recipe: Recipe, vocabulary: int, *, world: int, memory: int) -> None:
    """Raises UserError if the weights, in fp32, or one process's part of a step's batch take more
    than `memory` bytes. A run needs several times as much."""
    config = recipe.backbone_config
    words = config.vocab_size or vocabulary
    needed = 4 * encoder_class(config).least_parameters(config, words)
    if needed > memory:
        raise UserError(
            f"backbone: vocab_size {config.vocab_size or vocabulary:,}, max_positions "
            f"{config.max_positions:,}, hidden_size {config.hidden_size:,}, num_layers "
            f"{config.num_layers:,}: does not fit into memory: its weights alone take "
            f"{byte_size(needed)} in fp32, and {byte_size(memory)} can be used here"
        )
    tokens = max(size.tokens for size in recipe.stage_plan.sizes) // world
    if tokens * _TOKEN_BYTES > memory:
        raise UserError(
            f"batch: {tokens:,} tokens of a step for each of {world} processes take "
            f"{byte_size(tokens * _TOKEN_BYTES)}, and {byte_size(memory)} can be used here; lower "
            "it, or use more processes"
        )


_MOMENTS = 2
"""Values that a checkpoint stores for each trained parameter besides its weight."""
_BYTES = 4


def check_space(run: RunSpec, size: ModelSize) -> None:
    """Raises UserError unless the disk has room for the checkpoints and weights that the run will
    add to its folder."""
    needed, free = needed_bytes(run, size), free_bytes(run.folder)
    if needed > free:
        one, new = checkpoint_bytes(run, size), _new_checkpoints(run)
        raise UserError(
            f"run folder {run.folder}: the disk has {byte_size(free)} free, but this run writes "
            f"{byte_size(needed)}: {counted(new, 'checkpoint')} of {byte_size(one)} "
            "(save.keep, save.keep_every, save.best and the one being written) and "
            f"{counted(_new_outputs(run), 'copy')} of the weights; free some, choose another "
            "folder, lower save.keep, or set save.keep_every to 0"
        )


def needed_bytes(run: RunSpec, size: ModelSize) -> int:
    """The bytes that a run adds to its folder, at most."""
    checkpoints = _new_checkpoints(run) * checkpoint_bytes(run, size)
    return checkpoints + _new_outputs(run) * size.parameters * _BYTES


def free_bytes(folder: Path) -> int:
    """The free bytes of the disk of a folder, which need not exist."""
    return shutil.disk_usage(existing_part(folder)).free


def existing_part(folder: Path) -> Path:
    """The folder, or the first one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _new_checkpoints(run: RunSpec) -> int:
    save = run.recipe.save
    kept = save.keep + (save.keep - 1 if 0 < save.every < SPIKE_MARGIN else 0)
    kept += run.recipe.curriculum.steps // save.keep_every if save.every and save.keep_every else 0
    kept += save.best
    return max(kept + 1 - len(checkpoint.steps_in(run.checkpoints)), 1)


def _new_outputs(run: RunSpec) -> int:
    outputs = [run.folder / "weights", run.folder / "hf"]
    outputs += [run.best] if run.recipe.evaluate.best else []
    outputs += [run.folder / "hf/onnx"] if run.recipe.export_onnx else []
    heads = run.recipe.built_tasks if run.recipe.export_heads else ()
    outputs += [run.heads_folder / name for name in heads]
    return sum(not folder.is_dir() for folder in outputs)


def checkpoint_bytes(run: RunSpec, size: ModelSize) -> int:
    """The size of a checkpoint: that of the newest one of the run, if it has one."""
    if steps := checkpoint.steps_in(run.checkpoints):
        newest = run.checkpoints / checkpoint.folder_name(steps[0])
        return sum(file.stat().st_size for file in newest.iterdir())
    averages = 1 if run.recipe.optimizer.ema else 0
    return _BYTES * (size.parameters + size.trained * (_MOMENTS + averages))


def check_space_together(
    run: RunSpec, model: Model, processes: Processes, *, dry_run: bool
) -> None:
    """Raises UserError on all processes if rank 0 finds too little space. A run with checkpoints
    had enough when it began, and continues with a line: its saves wait for space."""
    size = size_of(model)
    if run.recipe.lora:  # has frozen weights, and so few others that they do not matter here
        size = replace(size, trained=0)

    def check() -> None:
        try:
            check_space(run, size)
        except UserError as error:
            if dry_run or not checkpoint.steps_in(run.checkpoints):
                raise
            log.warning("%s; training continues, and saves wait for space", error)

    if problem := at_rank0(processes, check):
        raise error_of(problem)


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
