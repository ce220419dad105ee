"""Trains a model under DeepSpeed: step, evaluate, save, load. No other module drives it.

    engine = Engine(model, ds_config=ds_config, optimizer=optimizer, rows=256, seed=1)
    for step in range(steps):
        result = engine.step(batches, lr=..., step=step, weights={"knowledge_masking": 1.0})

A step computes the same for any number of processes, ZeRO stage and accumulation: the loss of a
task is its sum over the whole step divided by the number of its labels in the whole step, over all
processes, and all processes run the same modules in the same order.

Programs run under `deepspeed`, `torchrun`, `mpirun` (with mpi4py) or as a single process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import Encoder, memory_shape
from palm_ds.model.fgm import FGM
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.memory import SlotMemories
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.checkpoint import checkpoint, sharded_state
from palm_ds.runtime.checkpoint.checkpoint import TWO_NEWEST, Retention
from palm_ds.runtime.checkpoint.engine_state import EngineState, full_state_dict
from palm_ds.runtime.checkpoint.shard_files import ResizedTable
from palm_ds.runtime.checkpoint.writer import SavedCheckpoint
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.deepspeed.ds_config_check import reason
from palm_ds.runtime.device.memory import names_micro_batch
from palm_ds.runtime.device.torch_settings import use_tf32
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.param_groups import (
    USUAL_NAMES,
    EncoderNames,
    Selection,
    freeze,
    param_lr_scales,
)
from palm_ds.runtime.optimizer.step_settings import StepHyperparameters
from palm_ds.runtime.optimizer.wrappers import StepFreezing
from palm_ds.runtime.processes.processes import Processes, check_supported, start, stop
from palm_ds.runtime.processes.watchdog import Watchdog
from palm_ds.runtime.step.grad_cache import GlobalBatchLoss
from palm_ds.runtime.step.gradient_accumulation import LossSums, MicroSteps, StepResult
from palm_ds.runtime.zero.swap_folder import SwapFolder
from palm_ds.runtime.zero.swapped_state import guard_swapping
from palm_ds.runtime.zero.zero_step import count_skipped, set_accumulation, set_up_skipping

log = logging.getLogger(__name__)


class Engine:
    """A model that trains under DeepSpeed. All processes make the same calls in the same order."""

    def __init__(
        self,
        model: Model,
        *,
        ds_config: DSConfig,
        optimizer: OptimizerConfig,
        rows: int,
        seed: int,
        update_counts: Mapping[str, int] | None = None,
        lr_scales: Mapping[str, float] | None = None,
        freezable: Iterable[Selection] = (),
        teacher: Callable[[Batch, int], Batch] | None = None,
    ):
        """`rows`: packed rows of a step, over all processes; steps may have others.
        `update_counts`: updates that each parameter has had, as in the checkpoint that is restored
        next. Parameters with different counts get optimizer groups of their own.
        `lr_scales`: {parameter pattern: multiplier of the learning rate}.
        `freezable`: the parameters that `step` may freeze.
        `teacher`: adds teacher outputs to a micro-batch of a step (train/teachers/teachers.py)."""
        self.processes = processes = start(ds_config)
        self.rank, self.world, self.device = processes.rank, processes.world, processes.device
        self.ds_config, self.seed = ds_config, seed
        self.micro_rows, _ = ds_config.micro_batching(rows, self.world)
        self.config = ds_config.deepspeed_config(rows=rows, world=self.world, clip=optimizer.clip)
        self._over_tokens = model.losses
        self.global_batch = _global_batch_losses(model, optimizer.fgm)
        attack = _fgm(model, optimizer.fgm, self.config) if optimizer.fgm else None
        self.layout = _layout(ds_config, self.world)
        freeze(model, optimizer.freeze)
        self._step_freezing = StepFreezing(freezable, model)
        self._optimizer: Any = _optimizer(
            model, optimizer, ds_config, self._step_freezing, update_counts, lr_scales
        )
        frozen = sharded_state.frozen_shards(model, self.rank, self.world)
        parts = model, self._optimizer, self.config, ds_config, self.processes
        self._engine, self._swap = _initialize(*parts)
        optimizers = self._optimizer, self._engine.optimizer
        self._hyperparameters = StepHyperparameters(*optimizers, optimizer)
        memories = SlotMemories(_memory_shape(model), self.device)
        self._state = EngineState(
            memories=memories,
            engine=self._engine,
            optimizer=self._optimizer,
            frozen=frozen,
            layout=self.layout,
            processes=self.processes,
            averages=optimizer.ema > 0,
        )
        self._micro_steps = MicroSteps(
            engine=self._engine,
            tasks=tuple(self._over_tokens),
            processes=self.processes,
            seed=seed,
            attack=attack,
            global_batch=self.global_batch,
            teacher=teacher,
            memories=memories,
        )
        self._step_freezing.watch(self._engine.module)
        self._watchdog = Watchdog(ds_config.watchdog_seconds)

    def step(
        self,
        batches: Sequence[Batch],
        lr: float,
        step: int,
        weights: Mapping[str, float] | None = None,
        stop: bool = False,
        frozen: Iterable[Selection] = (),
        decay_scale: float = 1.0,
        own: Mapping[str, Any] = MappingProxyType({}),
        progress: float = 1.0,
    ) -> StepResult:
        """Train one step on this process's micro-batches, as many on all processes. One with
        non-finite gradients changes nothing; `skipped_steps` counts it.

        `weights`: of each task's loss. `frozen`: some of `freezable`: weights, moments and update
        counts stay, and clipping leaves them out. `decay_scale`: factor of the weight decay. `own`:
        `betas`, `eps`, `clip` of this step. `progress`: share of the run's steps that are done."""
        assert not self._state.swapped, "the model holds the averaged weights"
        flags = (stop, self._state.writer.written)
        agreed = _agree(self.processes, self._over_tokens, batches, step, flags)
        set_accumulation(self._engine, len(batches) * (2 if self._micro_steps.attack else 1))
        self._hyperparameters.apply(lr, decay_scale, own)
        self._step_freezing.prepare(self._optimizer.param_groups, frozen)
        with names_micro_batch(self.micro_rows):
            sums = self._micro_steps.run(batches, step, agreed.counts, weights or {}, progress)
        self._watchdog.stepped()
        self.processes.reached(step + 1)
        return agreed.result(sums)

    def reduce(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Sums of scalars over all processes, in one all-reduce. Waits for the device."""
        return self.processes.sum_scalars(values)

    def take_forward_seconds(self) -> float:
        """The seconds of this process's forward passes since the last call, without waiting for
        others; 0 under ZeRO 3, which waits in them. Synchronizes with the device."""
        seconds = self._micro_steps.timer.take()
        return 0.0 if self.ds_config.stage == 3 else seconds

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last step, before clipping. Synchronizes with the device."""
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because their gradients were not finite."""
        return int(self.skipped_so_far)

    @property
    def skipped_so_far(self) -> int | torch.Tensor:
        """`skipped_steps`, without synchronizing with the device."""
        return count_skipped(self._engine)

    @property
    def loss_scale(self) -> float:
        """The loss scale of fp16; 1 in other precisions."""
        return float(self._engine.optimizer.loss_scale) if self.ds_config.fp16 else 1.0

    def nonfinite_weights(self) -> list[str]:
        """The parameters with values that are not finite. Collective; waits for the device."""
        self._watchdog.beat()
        return self._state.nonfinite_weights()

    def losses_again(
        self, batches: Sequence[Batch], tasks: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """This process's loss sums of a step's micro-batches under the weights of now, without
        dropout and teachers; `tasks`: those that have labels on some process. Collective."""
        self._watchdog.beat()
        return self._micro_steps.losses_again(batches, tasks)

    def evaluate(self, batch: Batch, scores: Collection[str] = ()) -> dict[str, Any]:
        """This process's loss sum and correct predictions of each task, and the logits of those in
        `scores`. All processes must evaluate equally often (ZeRO 3): pad with empty rows."""
        return self.apply(batch.to(self.device), scores)

    def apply(self, *inputs: Any) -> Any:
        """Run the model without gradients and dropout. All processes call it together."""
        self._watchdog.beat()
        self._engine.eval()
        try:
            with torch.no_grad():
                return self._engine(*inputs)
        finally:
            self._engine.train()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """On rank 0, all weights in fp32 on the CPU; an empty dict elsewhere. All processes take
        part, one weight at a time, so the device holds at most one extra."""
        self._watchdog.beat()
        return full_state_dict(self._engine.module, self._state.local(), self.device)

    def ema_weights(self) -> AbstractContextManager[None]:
        """A context in which the model holds the averaged weights (`optimizer.ema`; its own weights
        without it). Its own return bit for bit. All processes take part; no step or save inside."""
        return self._state.ema_weights()

    def save(
        self,
        folder: str | Path,
        state: Mapping[str, Any],
        *,
        step: int,
        keep: Retention = TWO_NEWEST,
    ) -> SavedCheckpoint:
        """Write the checkpoint of `step` with the caller's `state` (JSON); keep those of `keep`.
        Raises checkpoint.SaveError on all processes; training can continue after that."""
        self.start_save(folder, state, step=step, keep=keep, background=False)
        return self.finish_save()

    def start_save(
        self,
        folder: str | Path,
        state: Mapping[str, Any],
        *,
        step: int,
        keep: Retention = TWO_NEWEST,
        background: bool = True,
    ) -> bool:
        """First half of `save`: takes a snapshot, which `finish_save` publishes. Returns whether
        it is written in the background, for which the host needs memory for a copy."""
        with self._watchdog.beating():
            return self._state.start_save(
                Path(folder), state, step=step, keep=keep, background=background
            )

    def finish_save(self) -> SavedCheckpoint:
        """Publish the checkpoint that was started, once all processes have written it. Waits for
        them, but not after a step with `checkpoint_written`. Raises checkpoint.SaveError."""
        with self._watchdog.beating():
            return self._state.finish_save()

    def cancel_save(self) -> None:
        """Give up a checkpoint that was started, without the other processes: the run ends."""
        self._state.writer.cancel()

    def load(
        self,
        folder: str | Path,
        *,
        warn: Callable[[str], None] = log.warning,
        at_most: int | None = None,
        valid: int | None = None,
    ) -> dict[str, Any] | None:
        """Continue from the newest good checkpoint in `folder`. Returns its state, None if there is
        no checkpoint. `warn` gets a line for each bad one (default: logged). `at_most`: later steps
        are ignored, and deleted by the next save unless they are up to `valid`."""
        with self._watchdog.beating():
            return self._state.load(Path(folder), warn=warn, at_most=at_most, valid=valid)

    def restore(self, verified: checkpoint.VerifiedCheckpoint) -> None:
        """Continue from a checkpoint of any layout; with the same layout, bit for bit."""
        with self._watchdog.beating():
            self._state.restore(verified)

    def warm_start(
        self,
        verified: checkpoint.VerifiedCheckpoint,
        *,
        grown: Mapping[str, ResizedTable],
        fresh: Iterable[str],
    ) -> None:
        """Start with the weights and moments of another run. `fresh` parameters are not in it;
        `grown` tables have other rows there. Steps count from 0."""
        with self._watchdog.beating():
            self._state.warm_start(verified, grown, fresh)

    def beat(self) -> None:
        """Give a sign of life to the watchdog; it watches steps, evaluations and saves itself."""
        self._watchdog.beat()

    def release(self) -> None:
        """Free the weights and the optimizer. Other engines of this process can be used."""
        self._state.release()
        self._watchdog.close()
        self._engine.destroy()
        del self._engine, self._optimizer, self._hyperparameters, self._micro_steps
        self._swap.remove()

    def close(self) -> None:
        """Release the engine and leave the process group, on all processes."""
        self.release()
        stop()


def check_model(
    model: Model,
    optimizer: OptimizerConfig,
    ds_config: DSConfig,
    *,
    lr_scales: Mapping[str, float] | None = None,
    freezable: Iterable[Selection] = (),
) -> None:
    """Raises UserError as an engine of this model would, without making one. Freezes."""
    _global_batch_losses(model, optimizer.fgm)
    if optimizer.fgm:
        _check_same_tokens(model)
    freeze(model, optimizer.freeze)
    _optimizer(model, optimizer, ds_config, StepFreezing(freezable, model), None, lr_scales)


def _optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    ds_config: DSConfig,
    freezing: StepFreezing,
    update_counts: Mapping[str, int] | None,
    lr_scales: Mapping[str, float] | None,
) -> Any:
    """The optimizer of a model, some of whose parameters are frozen."""
    names = [name for name, _ in model.named_parameters()]
    encoder = _encoder_names(model)
    return build_optimizer(
        model,
        config,
        zero_stage=ds_config.stage,
        checked=ds_config.checks_itself,
        update_counts=update_counts,
        lr_scales=param_lr_scales(names, config.layer_decay, lr_scales, above=encoder.above),
        freezable=freezing.selections,
        names=encoder,
    )


def _encoder_names(model: nn.Module) -> EncoderNames:
    """Names of the parameters of the model's encoder; the usual ones for any other model."""
    encoder = getattr(model, "backbone", None)
    if not isinstance(encoder, Encoder):
        return USUAL_NAMES
    matrices = encoder.matrices(encoder.config)
    stacked = {matrix.path: matrix.stacked for matrix in matrices if len(matrix.stacked) > 1}
    return EncoderNames(above=encoder.above_layers, stacked=stacked)


def _memory_shape(model: nn.Module) -> tuple[int, int, int]:
    """(layers, memory, hidden) of what the model's encoder remembers of a document."""
    encoder = getattr(model, "backbone", None)
    return memory_shape(encoder.config) if isinstance(encoder, Encoder) else (0, 0, 0)


def _layout(ds_config: DSConfig, world: int) -> checkpoint.Layout:
    stage, precision = ds_config.stage, ds_config.precision
    return checkpoint.Layout(world=world, stage=stage, precision=precision)


def _initialize(
    model: nn.Module,
    optimizer: Any,
    config: dict[str, Any],
    ds_config: DSConfig,
    processes: Processes,
) -> tuple[Any, SwapFolder]:
    """DeepSpeed's engine, and the folder that it swaps to."""
    import deepspeed

    check_supported(ds_config, processes.device)
    use_tf32(ds_config.tf32, processes.device)
    swap = SwapFolder.claim(ds_config, model, processes)
    try:
        engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=swap.in_config(config)
        )[0]
    except AssertionError as error:  # of DeepSpeed: settings that do not go together
        raise UserError(f"{ds_config.path}: DeepSpeed refuses it: {reason(error)}") from None
    set_up_skipping(engine.optimizer, ds_config)
    guard_swapping(engine.optimizer)
    if processes.world == 1 and ds_config.stage == 0:
        engine.enable_backward_allreduce = False  # it would copy every gradient twice
    return engine, swap


class _Agreement(NamedTuple):
    """The agreement of the processes before a step."""

    counts: dict[str, int]
    """The divisor of each task's loss."""
    tokens: int
    """Without padding."""
    stop: bool
    """Whether any process was asked to stop."""
    written: bool
    """Whether all of them have written a checkpoint in the background."""

    def result(self, sums: LossSums) -> StepResult:
        return StepResult(
            loss_sums=sums.loss,
            correct=sums.correct,
            counts=self.counts,
            tokens=self.tokens,
            stop=self.stop,
            checkpoint_written=self.written,
        )


def _agree(
    processes: Processes,
    over_tokens: Mapping[str, bool],
    batches: Sequence[Batch],
    step: int,
    flags: Sequence[bool],
) -> _Agreement:
    """One small all-reduce. `flags`: whether to stop, and whether this process has written."""
    for batch in batches:
        for task in batch.labels:
            assert task in over_tokens, f"labels of {task}, which the model does not have"
    counts = [sum(batch.count(task) for batch in batches) for task in over_tokens]
    tokens = sum(batch.real_tokens for batch in batches)
    numbers = processes.sum([tokens, step, *counts, *map(int, flags)])
    tokens, steps, totals = numbers[0], numbers[1], numbers[2:]
    assert steps == step * processes.world, "processes are at different steps"
    pairs = zip(over_tokens.items(), totals, strict=False)
    divisors = {name: tokens if over else labels for (name, over), labels in pairs}
    stopping, written = totals[len(over_tokens) :]
    return _Agreement(divisors, tokens, stopping > 0, written == processes.world)


def _global_batch_losses(model: Model, fgm: float) -> dict[str, GlobalBatchLoss]:
    """{task: head} of the tasks whose loss is over the whole step. Raises UserError if there are
    any with `fgm`, the length of FGM's perturbation."""
    heads = {task: model.heads[head] for task, head in model.head_of.items()}
    global_heads = {
        task: cast(GlobalBatchLoss, head)
        for task, head in heads.items()
        if getattr(head, "global_batch", False)
    }
    if fgm and global_heads:
        raise UserError(
            f"optimizer.fgm: tasks.{next(iter(global_heads))} compares all texts of a step, "
            "which embeddings perturbed in one micro-batch do not allow; remove one of the two"
        )
    return global_heads


def _fgm(model: Model, length: float, config: dict[str, Any]) -> FGM:
    """FGM (palm_ds/model/fgm.py) on the token embeddings: two passes per micro-batch."""
    _check_same_tokens(model)
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        config[key] *= 2
    return FGM(model.backbone.word, length)


def _check_same_tokens(model: Model) -> None:
    """Raises UserError for a model that makes tokens itself, of the embeddings of FGM: a generator,
    or one that fills in placeholders."""
    if makers := [*model.generators, *model.pseudo_tokens]:
        raise UserError(
            f"optimizer.fgm: tasks.{makers[0]} makes other tokens from perturbed embeddings; "
            "remove one of the two"
        )
