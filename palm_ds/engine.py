"""The only door to DeepSpeed: start, step, evaluate, save, load.

    engine = Engine(model, machine=machine, optimizer=optimizer, rows=256, seed=1)
    for step in range(steps):
        result = engine.step(batches, lr=..., step=step, weights={"knowledge_masking": 1.0})

What a step computes does not depend on how many processes there are, on the ZeRO stage or on
accumulation: the loss of a task is its sum over the whole step divided by the count of its labels
over the whole step, on all processes, and all processes run the same modules in the same order.

The same program runs under `deepspeed`, `torchrun`, `mpirun` (with mpi4py) and alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from palm_ds.common import rng as keyed
from palm_ds.common.errors import UserError
from palm_ds.model.batch import Batch
from palm_ds.model.fgm import FGM
from palm_ds.runtime import checkpoint
from palm_ds.runtime import sharded_state as portable
from palm_ds.runtime.ds_config import Machine
from palm_ds.runtime.optimizer import (
    OptimizerConfig,
    Resting,
    build_optimizer,
    freeze,
    rate_factors,
    set_lr,
)
from palm_ds.runtime.processes import Watchdog, accelerator, start, stop

log = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step leaves to be read later. The sums are this process's and live on the device;
    `Engine.reduce` adds them up over all processes when somebody wants to see them."""

    loss_sums: Mapping[str, torch.Tensor]
    correct: Mapping[str, torch.Tensor]
    counts: Mapping[str, int]
    """Labels of each task over all processes."""
    tokens: int
    """Real tokens over all processes."""
    stop: bool
    """Some process was asked to stop."""


class Engine:
    """A model that trains under DeepSpeed. All processes make the same calls in the same order."""

    def __init__(
        self,
        model: nn.Module,
        *,
        machine: Machine,
        optimizer: OptimizerConfig,
        rows: int,
        seed: int,
        steps: Mapping[str, int] | None = None,
        factors: Mapping[str, float] | None = None,
        apart: Iterable[str] = (),
    ):
        """`steps`: how many updates each parameter has had (`Found.parameters` of the checkpoint
        that is restored next); parameters of different age are kept apart.
        `factors`: {pattern of parameter names: factor of the learning rate}, as a head's own rate.
        `apart`: the patterns that `step` may be told to let rest."""
        import deepspeed

        self.processes = start(machine)
        self.rank, self.world = self.processes.rank, self.processes.world
        self.local_rank, self.device = self.processes.local_rank, self.processes.device
        self.machine, self.seed = machine, seed
        self.micro_rows, self.accumulation = machine.split(rows, self.world)
        self.config = machine.deepspeed_config(rows=rows, world=self.world, clip=optimizer.clip)
        self._attack = self._attacked(model, optimizer.fgm) if optimizer.fgm else None
        self.tasks = tuple(model.head_of)  # type: ignore[arg-type]
        self.layout = checkpoint.Layout(
            world=self.world, stage=machine.stage, precision=machine.precision
        )
        self._rejected: tuple[int, ...] = ()
        freeze(model, optimizer.freeze)
        names = [name for name, _ in model.named_parameters()]
        self._resting = Resting(apart, names)
        self._optimizer: Any = build_optimizer(
            model,
            optimizer,
            zero_stage=machine.stage,
            checked=machine.checks_itself,
            steps=steps,
            factors=rate_factors(names, optimizer.layer_decay, factors),
            apart=self._resting.patterns,
        )
        self._frozen = portable.frozen_shares(model, self.rank, self.world)
        self._averages, self._swapped = optimizer.ema > 0, False
        _check_precision(machine, self.device)
        self._engine: Any = deepspeed.initialize(
            model=model, optimizer=self._optimizer, config=self.config
        )[0]
        if self.world == 1 and machine.stage == 0:
            self._engine.enable_backward_allreduce = False  # it would copy every gradient twice
        self._resting.watch(self._engine.module)
        self._watchdog = Watchdog(machine.watchdog_minutes * 60)

    # -- training --

    def step(
        self,
        batches: Sequence[Batch],
        lr: float,
        step: int,
        weights: Mapping[str, float] | None = None,
        stop: bool = False,
        rest: Iterable[str] = (),
    ) -> StepResult:
        """One optimizer step over this process's micro-batches of it.

        `weights`: what each task counts for (1 where not given). A step whose gradients are not
        finite changes nothing; `skipped_steps` counts it. `rest`: patterns, of those given as
        `apart`; parameters that they fit are as if they were no parameters in this step: weights,
        moments and their count of steps stay, and the norm that is clipped is that of the others.
        """
        assert not self._swapped, "the averages stand in the weights' place"
        assert len(batches) == self.accumulation, (len(batches), self.accumulation)
        counts, tokens, stop = self._agree(batches, step, stop)
        scales = {
            task: (weights or {}).get(task, 1.0) * self.world / max(counts[task], 1)
            for task in self.tasks
        }
        set_lr(self._optimizer.param_groups, lr)
        self._resting.prepare(self._optimizer.param_groups, rest)
        # Dropout depends on (seed, step, rank) alone: no random state has to be saved.
        torch.manual_seed(keyed.key(self.seed, "dropout", step, self.rank))
        sums = _Sums(self.tasks)
        self._engine.train()
        for batch in batches:
            batch = batch.to(self.device)
            if self._attack:
                self._attack.begin(batch)
            sums.add(self._pass(batch, scales))
            if self._attack:
                self._attack.attack()
                self._pass(batch, scales)
                self._attack.restore()
        self._watchdog.beat()
        return StepResult(
            loss_sums=sums.loss, correct=sums.correct, counts=counts, tokens=tokens, stop=stop
        )

    def _pass(self, batch: Batch, scales: Mapping[str, float]) -> dict[str, Any]:
        """Forward, backward; a step as well where DeepSpeed has counted enough of these."""
        outputs = self._engine(batch)
        total = sum(outputs[task].loss_sum * scales[task] for task in self.tasks)
        # The average over processes that follows undoes `world`.
        self._engine.backward(total, scale_wrt_gas=False)
        self._engine.step()
        return outputs

    def _attacked(self, model: Any, length: float) -> FGM:
        """For DeepSpeed each micro-batch is then two."""
        for key in ("train_batch_size", "gradient_accumulation_steps"):
            self.config[key] *= 2
        return FGM(model.backbone.word, length)

    def _agree(
        self, batches: Sequence[Batch], step: int, stop: bool
    ) -> tuple[dict[str, int], int, bool]:
        """One small all-reduce: label counts, real tokens, whether anybody wants to stop."""
        for batch in batches:
            for task in batch.labels:
                assert task in self.tasks, f"labels of {task}, which the model does not have"
        counts = [sum(batch.count(task) for batch in batches) for task in self.tasks]
        tokens = sum(batch.real_tokens for batch in batches)
        *totals, tokens, stopping, steps = self.processes.sum([*counts, tokens, int(stop), step])
        assert steps == step * self.world, "processes are at different steps"
        return dict(zip(self.tasks, totals, strict=True)), tokens, stopping > 0

    def reduce(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Sums over all processes of scalars, read in one go. It waits for the device, so it
        belongs to logging steps."""
        stacked = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values.values()]
        )
        if self.world > 1:
            dist.all_reduce(stacked)
        return dict(zip(values, stacked.tolist(), strict=True))

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last step, before clipping. Waits for the device."""
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite, and that therefore changed nothing."""
        return int(self._engine.skipped_steps)

    @property
    def loss_scale(self) -> float:
        """The factor fp16 gradients are scaled by; 1 otherwise."""
        if self.machine.precision != "fp16":
            return 1.0
        return float(self._engine.optimizer.loss_scale)

    # -- reading --

    def evaluate(self, batch: Batch, scores: Collection[str] = ()) -> dict[str, Any]:
        """Loss sum and right guesses of each task, without gradients or dropout, and the scores of
        those named. This process's sums: add them up and `reduce` them. Every process must evaluate
        equally often (ZeRO 3 gathers weights together): pad with batches of empty rows."""
        self._watchdog.beat()
        self._engine.eval()
        try:
            with torch.no_grad():
                return self._engine(batch.to(self.device), scores)
        finally:
            self._engine.train()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """On rank 0 every weight whole, in fp32, on the host; elsewhere an empty dict. All
        processes take part, one weight at a time, so that the device holds one extra at most."""
        out: dict[str, torch.Tensor] = {}
        held = self._held()
        for name, parameter in held.parameters.items():
            frozen = name in self._frozen
            full = held.whole(name, self.device) if frozen else self._full(parameter)
            if self.rank == 0:
                out[name] = full.detach().to("cpu", torch.float32, copy=True)
        if self.rank == 0:
            kept = self._engine.module.state_dict().keys()
            buffers = dict(self._engine.module.named_buffers())
            out |= {n: b.detach().cpu().clone() for n, b in buffers.items() if n in kept}
        return out

    def _full(self, parameter: nn.Parameter) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if self.machine.stage == 0:
            return parameter
        full = safe_get_full_fp32_param(parameter)
        assert full is not None
        return full

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model has the running averages for weights (`optimizer.ema`; without it, its
        own weights): to evaluate, and for `full_state_dict`. Afterwards it has its own again, bit
        for bit. All processes take part; steps and checkpoints have to wait."""
        if not self._averages:
            yield
            return
        assert not self._swapped
        held = self._held()
        held.swap()
        self._swapped = True
        try:
            yield
        finally:
            held.swap()
            self._swapped = False

    # -- checkpoints --

    def save(
        self, folder: str | Path, state: Mapping[str, Any], *, step: int, keep: int = 2
    ) -> Path:
        """Publish a checkpoint of `step` with the caller's `state` (JSON) in `folder`; keep the
        newest `keep`. Raises checkpoint.SaveError, on all processes, when it cannot be written;
        the run may go on after it."""
        assert not self._swapped, "the averages stand in the weights' place"
        self._watchdog.beat()
        held = self._held()

        def write(place: Path, written: checkpoint.Written) -> None:
            portable.write_stretches(
                held.written(),
                f"process_{self.rank:05}",
                lambda name, make: written.write(place / name, make),
            )

        path = checkpoint.save(
            Path(folder),
            step,
            write=write,
            layout=self.layout,
            parameters=portable.steps_of(held.stretches()),
            engine=self._counters(),
            state=state,
            group=self.processes,
            keep=keep,
            reject=self._rejected,
        )
        self._rejected = ()
        self._watchdog.beat()
        return path

    def load(
        self, folder: str | Path, *, warn: Callable[[str], None] | None = None
    ) -> dict[str, Any] | None:
        """Continue from the newest good checkpoint in `folder`: the state it was saved with, or
        None if there is no checkpoint. `warn` gets a line for each bad one; by default it is
        logged."""
        self._watchdog.beat()
        found = checkpoint.find(Path(folder), group=self.processes, warn=warn or log.warning)
        if found is None:
            return None
        self.restore(found)
        return found.state

    def restore(self, found: checkpoint.Found) -> None:
        """Continue from a checkpoint, whatever processes, ZeRO stage and precision saved it. With
        its own layout it continues bit for bit."""
        portable.restore(self._held(), portable.Stored(found.files), found.parameters)
        self._set_counters(found.engine)
        self._rejected = found.rejected
        self._watchdog.beat()

    def inherit(
        self,
        found: checkpoint.Found,
        *,
        grown: Mapping[str, portable.Grown],
        fresh: Iterable[str],
    ) -> None:
        """Take over weights and moments of another run; `fresh` parameters are not in it, `grown`
        tables have other rows than in it. Steps are counted from 0."""
        stored = portable.Stored(found.files)
        portable.restore(self._held(), stored, found.parameters, grown=grown, fresh=fresh)
        self._watchdog.beat()

    def _held(self) -> portable.Held:
        return portable.Held(
            parameters=dict(self._engine.module.named_parameters()),
            base=self._optimizer,
            zero=self._engine.optimizer if self.machine.stage else None,
            stage=self.machine.stage,
            rank=self.rank,
            world=self.world,
            frozen=self._frozen,
        )

    def _counters(self) -> dict[str, Any]:
        """What else DeepSpeed's engine remembers from step to step."""
        counters = {name: getattr(self._engine, name) for name in _COUNTERS}
        if self.machine.precision == "fp16":
            scaler = self._engine.optimizer.loss_scaler
            counters["scaler"] = {name: getattr(scaler, name) for name in _SCALER}
        return counters

    def _set_counters(self, counters: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self._engine, name, counters[name])
        passes = self.config["gradient_accumulation_steps"]
        self._engine.micro_steps = counters["global_steps"] * passes
        if self.machine.precision == "fp16" and "scaler" in counters:
            for name, value in counters["scaler"].items():
                setattr(self._engine.optimizer.loss_scaler, name, value)

    def release(self) -> None:
        """Let go of weights and optimizer; other engines of this process go on. A released engine
        is of no more use."""
        self._watchdog.close()
        self._engine.destroy()
        self._engine = self._optimizer = None

    def close(self) -> None:
        """End the run in good order, on all processes: the engine, and the joining of them."""
        self.release()
        stop()


class _Sums:
    """Losses and right guesses added up on the device."""

    def __init__(self, tasks: Iterable[str]):
        self.tasks = tuple(tasks)
        self.loss: dict[str, torch.Tensor] = {}
        self.correct: dict[str, torch.Tensor] = {}

    def add(self, outputs: Mapping[str, Any]) -> None:
        for task in self.tasks:
            loss, correct = outputs[task].loss_sum.detach(), outputs[task].correct.detach()
            self.loss[task] = self.loss[task] + loss if task in self.loss else loss
            self.correct[task] = self.correct[task] + correct if task in self.correct else correct


def _check_precision(machine: Machine, device: torch.device) -> None:
    able = {
        "fp32": lambda: True,
        "bf16": accelerator().is_bf16_supported,
        "fp16": accelerator().is_fp16_supported,
    }
    if not able[machine.precision]():
        others = [name for name in ("bf16", "fp32") if able[name]()]
        raise UserError(
            f"{machine.path}: {machine.precision}: this machine ({device.type}) cannot train in "
            f"it; use {' or '.join(others)}"
        )
