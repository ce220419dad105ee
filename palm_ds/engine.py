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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from palm_ds.common.rng import derive_key
from palm_ds.model.batch import Batch
from palm_ds.model.fgm import FGM
from palm_ds.runtime import checkpoint, sharded_state
from palm_ds.runtime.ds_config import DSConfig
from palm_ds.runtime.engine_counters import read_counters, restore_counters
from palm_ds.runtime.forward_timer import ForwardTimer
from palm_ds.runtime.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer_wrappers import StepFreezing
from palm_ds.runtime.param_groups import freeze, param_lr_scales, set_lr
from palm_ds.runtime.processes import Processes, check_precision, start, stop
from palm_ds.runtime.shard_files import ResizedTable, ShardReader, write_shards
from palm_ds.runtime.step_result import LossSums, StepResult
from palm_ds.runtime.watchdog import Watchdog

log = logging.getLogger(__name__)


class Engine:
    """A model that trains under DeepSpeed. All processes make the same calls in the same order."""

    def __init__(
        self,
        model: nn.Module,
        *,
        ds_config: DSConfig,
        optimizer: OptimizerConfig,
        rows: int,
        seed: int,
        update_counts: Mapping[str, int] | None = None,
        lr_scales: Mapping[str, float] | None = None,
        freezable: Iterable[str] = (),
    ):
        """`rows`: packed rows of a step, over all processes.
        `update_counts`: updates that each parameter has had, as in the checkpoint that is restored
        next. Parameters with different counts get optimizer groups of their own.
        `lr_scales`: {parameter pattern: multiplier of the learning rate}.
        `freezable`: the parameter patterns that `step` may freeze."""
        self.processes = start(ds_config)
        self.rank, self.world = self.processes.rank, self.processes.world
        self.local_rank, self.device = self.processes.local_rank, self.processes.device
        self.ds_config, self.seed = ds_config, seed
        self._fp16 = ds_config.precision == "fp16"
        self.micro_rows, self.accumulation = ds_config.micro_batching(rows, self.world)
        self.config = ds_config.deepspeed_config(rows=rows, world=self.world, clip=optimizer.clip)
        self._attack = _fgm(model, optimizer.fgm, self.config) if optimizer.fgm else None
        self.tasks = tuple(model.head_of)  # type: ignore[arg-type]
        self.layout = checkpoint.Layout(
            world=self.world, stage=ds_config.stage, precision=ds_config.precision
        )
        self._invalid: tuple[int, ...] = ()
        self._forward_timer = ForwardTimer(self.device)
        freeze(model, optimizer.freeze)
        names = [name for name, _ in model.named_parameters()]
        self._step_freezing = StepFreezing(freezable, names)
        self._optimizer: Any = build_optimizer(
            model,
            optimizer,
            zero_stage=ds_config.stage,
            checked=ds_config.checks_itself,
            update_counts=update_counts,
            lr_scales=param_lr_scales(names, optimizer.layer_decay, lr_scales),
            freezable=self._step_freezing.patterns,
        )
        self._frozen = sharded_state.frozen_shards(model, self.rank, self.world)
        self._averages, self._swapped = optimizer.ema > 0, False
        check_precision(ds_config, self.device)
        self._engine: Any = _initialize(model, self._optimizer, self.config, ds_config, self.world)
        self._step_freezing.watch(self._engine.module)
        minutes = ds_config.watchdog_minutes
        self._watchdog = Watchdog(None if minutes is None else minutes * 60)

    # -- training --

    def step(
        self,
        batches: Sequence[Batch],
        lr: float,
        step: int,
        weights: Mapping[str, float] | None = None,
        stop: bool = False,
        frozen: Iterable[str] = (),
    ) -> StepResult:
        """Train one step on this process's micro-batches.

        `weights`: the weight of each task's loss (default 1). A step with non-finite gradients
        changes nothing; `skipped_steps` counts it. `frozen`: parameter patterns, out of
        `freezable`, to freeze in this step: their weights, moments and update counts stay, and they
        do not count in gradient clipping.
        """
        assert not self._swapped, "the model holds the averaged weights"
        assert len(batches) == self.accumulation, (len(batches), self.accumulation)
        counts, tokens, stop = _agree(self.processes, self.tasks, batches, step, stop)
        scales = {
            task: (weights or {}).get(task, 1.0) * self.world / max(counts[task], 1)
            for task in self.tasks
        }
        set_lr(self._optimizer.param_groups, lr)
        self._step_freezing.prepare(self._optimizer.param_groups, frozen)
        # What draws from torch's generator depends on (seed, step, rank) alone, so checkpoints need
        # no random state.
        torch.manual_seed(derive_key(self.seed, "dropout", step, self.rank))
        sums = LossSums(self.tasks)
        self._engine.train()
        for batch in batches:
            batch = self._with_dropout(batch.to(self.device), step)
            if self._attack:
                self._attack.begin(batch)
            sums.add(self._pass(batch, scales))
            if self._attack:
                self._attack.attack()
                self._pass(self._with_dropout(batch, step, "attack"), scales)
                self._attack.restore()
        self._watchdog.stepped()
        self.processes.reached(step + 1)
        return StepResult(
            loss_sums=sums.loss, correct=sums.correct, counts=counts, tokens=tokens, stop=stop
        )

    def _with_dropout(self, batch: Batch, step: int, *more: str) -> Batch:
        """The batch with its masks' key: the same on all processes."""
        return replace(batch, dropout_key=derive_key(self.seed, "dropout", step, *more) >> 1)

    def _pass(self, batch: Batch, scales: Mapping[str, float]) -> dict[str, Any]:
        """Forward and backward; DeepSpeed steps the optimizer after the last micro-batch."""
        with self._forward_timer.measure():
            outputs = self._engine(batch)
        total = sum(outputs[task].loss_sum * scales[task] for task in self.tasks)
        # The average over processes that follows undoes `world`.
        self._engine.backward(total, scale_wrt_gas=False)
        self._engine.step()
        return outputs

    def reduce(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Sums of scalars over all processes, in one all-reduce. Synchronises with the device: call
        it in logging steps only."""
        return self.processes.sum_scalars(values)

    def take_forward_seconds(self) -> float:
        """The seconds of this process's forward passes since the last call, without waiting for
        others; 0 under ZeRO 3, which waits in them. Synchronises with the device."""
        seconds = self._forward_timer.take()
        return 0.0 if self.ds_config.stage == 3 else seconds

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last step, before clipping. Synchronises with the device."""
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because their gradients were not finite."""
        return int(self._engine.skipped_steps)

    @property
    def loss_scale(self) -> float:
        """The loss scale of fp16; 1 in other precisions."""
        return float(self._engine.optimizer.loss_scale) if self._fp16 else 1.0

    # -- reading --

    def evaluate(self, batch: Batch, scores: Collection[str] = ()) -> dict[str, Any]:
        """This process's loss sum and correct predictions of each task (no gradients, no dropout),
        and the logits of the tasks in `scores`. All processes must evaluate equally often, since
        ZeRO 3 gathers weights together: pad with batches of empty rows."""
        self._watchdog.beat()
        self._engine.eval()
        try:
            with torch.no_grad():
                return self._engine(batch.to(self.device), scores)
        finally:
            self._engine.train()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """On rank 0, all weights in fp32 on the CPU; an empty dict elsewhere. All processes take
        part, one weight at a time, so the device holds at most one extra."""
        self._watchdog.beat()
        out = _full_parameters(self._local_shards(), self._frozen, self.device)
        return out | _buffers(self._engine.module) if self.rank == 0 else {}

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """A context in which the model holds the averaged weights (`optimizer.ema`; its own weights
        without it). Its own return bit for bit. All processes take part; no step or save inside."""
        if not self._averages:
            yield
            return
        assert not self._swapped
        local = self._local_shards()
        local.swap_ema()
        self._swapped = True
        try:
            yield
        finally:
            local.swap_ema()
            self._swapped = False

    # -- checkpoints --

    def save(
        self, folder: str | Path, state: Mapping[str, Any], *, step: int, keep: int = 2
    ) -> Path:
        """Write the checkpoint of `step`, with the caller's `state` (JSON), to `folder`, and keep
        the newest `keep`. Raises checkpoint.SaveError on all processes if it cannot be written;
        training can continue after that."""
        assert not self._swapped, "the model holds the averaged weights"
        self._watchdog.beat()
        local = self._local_shards()
        path = checkpoint.save(
            Path(folder),
            step,
            write=_shard_writer(local, self.rank),
            layout=self.layout,
            parameters=sharded_state.update_counts(local.shards()),
            engine=read_counters(self._engine, fp16=self._fp16),
            state=state,
            group=self.processes,
            keep=keep,
            invalid=self._invalid,
        )
        self._invalid = ()
        self._watchdog.beat()
        self.processes.reached(step, saved=step)
        return path

    def load(
        self,
        folder: str | Path,
        *,
        warn: Callable[[str], None] | None = None,
        at_most: int | None = None,
    ) -> dict[str, Any] | None:
        """Continue from the newest good checkpoint in `folder`. Returns its state, None if there is
        no checkpoint. `warn` gets a line for each bad one (default: logged). `at_most`: later steps
        are ignored, and deleted by the next save."""
        self._watchdog.beat()
        found = checkpoint.latest_good(
            Path(folder), group=self.processes, warn=warn or log.warning, at_most=at_most
        )
        if found is None:
            return None
        self.restore(found)
        return found.state

    def restore(self, found: checkpoint.VerifiedCheckpoint) -> None:
        """Continue from a checkpoint of any process count, ZeRO stage and precision; with the same
        layout, bit for bit."""
        sharded_state.restore(self._local_shards(), ShardReader(found.files), found.parameters)
        restore_counters(self._engine, found.engine, fp16=self._fp16)
        self._invalid = found.invalid
        self._watchdog.beat()
        self.processes.reached(found.step, saved=found.step)

    def warm_start(
        self,
        found: checkpoint.VerifiedCheckpoint,
        *,
        grown: Mapping[str, ResizedTable],
        fresh: Iterable[str],
    ) -> None:
        """Start with the weights and moments of another run. `fresh` parameters are not in it;
        `grown` tables have other rows there. Steps count from 0."""
        stored = ShardReader(found.files)
        sharded_state.restore(
            self._local_shards(), stored, found.parameters, resized=grown, fresh=fresh
        )
        self._watchdog.beat()

    def _local_shards(self) -> sharded_state.LocalShards:
        return sharded_state.LocalShards(
            parameters=dict(self._engine.module.named_parameters()),
            base=self._optimizer,
            zero=self._engine.optimizer if self.ds_config.stage else None,
            stage=self.ds_config.stage,
            rank=self.rank,
            world=self.world,
            frozen=self._frozen,
        )

    def beat(self) -> None:
        """Give a sign of life to the watchdog; it watches steps, evaluations and saves itself."""
        self._watchdog.beat()

    def release(self) -> None:
        """Free the weights and the optimizer. The engine cannot be used afterwards; other engines
        of this process can."""
        self._watchdog.close()
        self._engine.destroy()
        self._engine = self._optimizer = None

    def close(self) -> None:
        """Release the engine and leave the process group, on all processes."""
        self.release()
        stop()


def _initialize(
    model: nn.Module, optimizer: Any, config: dict[str, Any], ds_config: DSConfig, world: int
) -> Any:
    import deepspeed

    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if world == 1 and ds_config.stage == 0:
        engine.enable_backward_allreduce = False  # it would copy every gradient twice
    return engine


def _agree(
    processes: Processes, tasks: Sequence[str], batches: Sequence[Batch], step: int, stop: bool
) -> tuple[dict[str, int], int, bool]:
    """One small all-reduce: label counts, tokens without padding, whether to stop."""
    for batch in batches:
        for task in batch.labels:
            assert task in tasks, f"labels of {task}, which the model does not have"
    counts = [sum(batch.count(task) for batch in batches) for task in tasks]
    tokens = sum(batch.real_tokens for batch in batches)
    *totals, tokens, stopping, steps = processes.sum([*counts, tokens, int(stop), step])
    assert steps == step * processes.world, "processes are at different steps"
    return dict(zip(tasks, totals, strict=True)), tokens, stopping > 0


def _fgm(model: Any, length: float, config: dict[str, Any]) -> FGM:
    """FGM (palm_ds/model/fgm.py) on the token embeddings: two passes per micro-batch."""
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        config[key] *= 2
    return FGM(model.backbone.word, length)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the persistent buffers, on the CPU."""
    stored = model.state_dict().keys()
    return {n: b.detach().cpu().clone() for n, b in model.named_buffers() if n in stored}


def _shard_writer(
    local: sharded_state.LocalShards, rank: int
) -> Callable[[Path, checkpoint.FileManifest], None]:
    """What writes this process's shards into the folder of a checkpoint."""

    def write(folder: Path, written: checkpoint.FileManifest) -> None:
        write_shards(
            local.shards_to_write(),
            f"process_{rank:05}",
            lambda name, make: written.write(folder / name, make),
        )

    return write


def _full_parameters(
    local: sharded_state.LocalShards, frozen: Collection[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Every parameter whole, in fp32 on the CPU of rank 0. All processes take part."""
    out = {}
    for name, parameter in local.parameters.items():
        if name in frozen:
            full = local.full_frozen(name, device)
        else:
            full = _gathered(parameter, local.stage)
        if local.rank == 0:
            out[name] = full.detach().to("cpu", torch.float32, copy=True)
    return out


def _gathered(parameter: nn.Parameter, stage: int) -> torch.Tensor:
    """The whole fp32 value of a parameter that ZeRO may have sharded."""
    from deepspeed.utils import safe_get_full_fp32_param

    if stage == 0:
        return parameter
    full = safe_get_full_fp32_param(parameter)
    assert full is not None
    return full
