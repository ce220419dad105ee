"""(a) Whether everything computes the same: kernels, precisions, a resumed run.

A kernel is right if a model that uses it is not further from the plain model in fp32 than the plain
model in the kernel's own precision is, by more than a factor. So no tolerance has to be guessed.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.gpu_parts.context import Context, Row
from benchmarks.gpu_parts.models import EngineLoop, Setup
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import IMPLEMENTATIONS, Kernels
from palm_ds.model.ops.implementation import Implementation
from palm_ds.runtime.device.torch_settings import DTYPES

PLAIN = tuple((name, choices[-1].name) for name, choices in IMPLEMENTATIONS.items())
FACTOR, FLOOR = 2.0, 1e-5
"""Times the error of the plain form in the same precision, and what rounding alone may give."""
WITH_DROPOUT = ("attention", "layer_norm")
"""Operations whose implementations may drop themselves."""
DRAWS = 12
CURVES = {"bf16": 0.02, "fp16": 0.02, "fp32": 2e-3}
"""How far the loss of any of the 50 steps may be from fp32's, relative to it."""


def kernels(context: Context) -> None:
    """Every implementation of every operation in every precision, against the plain ones."""
    _compare_all(context, _small(context), tuple(IMPLEMENTATIONS))


def windows(context: Context) -> None:
    """Those of attention in a ModernBERT, which has windows and rotary positions."""
    _compare_all(context, _small(context, "modernbert"), ("attention", "compile"))


def _compare_all(context: Context, setup: Setup, operations: Sequence[str]) -> None:
    [batch] = setup.batches(1)
    judge = _Judge(setup, batch, context)
    for operation, each, precision in _forms(context):
        names = {"operation": operation, "form": each.name, "precision": precision}
        if operation not in operations:
            continue
        if reason := _unavailable(each, setup, precision, context):
            context.add(**names, skipped=reason)
            continue
        context.measure(
            lambda o=operation, e=each, p=precision: judge.compare(o, e.name, p), needs=3, **names
        )


def _forms(context: Context) -> Iterator[tuple[str, Implementation, str]]:
    """Every implementation but the plain ones, in each precision; what compiles comes last."""
    for slow in (False, True):
        for precision in ("bf16", "fp16", "fp32"):
            for operation, choices in IMPLEMENTATIONS.items():
                if (operation == "compile") == slow and not (slow and context.toy):
                    yield from ((operation, each, precision) for each in choices[:-1])


def _small(context: Context, encoder: str = "bert") -> Setup:
    prefix = "" if encoder == "bert" else f"{encoder}-"
    if context.toy:
        return Setup(shape=f"{prefix}toy", length=32, rows=2, dropout=0.0, words=500)
    return Setup(shape=f"{prefix}mini", length=512, rows=4, dropout=0.0)


def _unavailable(
    each: Implementation, setup: Setup, precision: str, context: Context
) -> str | None:
    if context.device.type == "cpu" and precision == "fp16":
        return "fp16 is for GPUs"
    now = setup.changed(precision=precision)
    return each.unavailable(now.environment(context.device, "counter"))


class _Judge:
    """Compares models with one kernel other than plain. Without dropout: outputs and gradients.
    With it: masks repeat for the same key, differ for others, and leave the mean loss as it is."""

    def __init__(self, setup: Setup, batch: Batch, context: Context):
        self.setup, self.batch, self.device = setup, batch.to(context.device), context.device
        self.reference = self._losses_and_gradients({}, "fp32")
        self.plain: dict[str, float] = {}

    def compare(self, operation: str, form: str, precision: str) -> Row:
        if precision not in self.plain:
            self.plain[precision] = self._error({}, precision)
        error = self._error({operation: form}, precision)
        allowed = max(FACTOR * self.plain[precision], FLOOR)
        found: Row = {"distance": error, "plain": self.plain[precision]}
        found["right"] = error <= allowed
        if dropout := self._dropout_of(operation, form, precision):
            found |= self._with_dropout({operation: form, "dropout": dropout}, precision)
            found["right"] = found["right"] and found["repeats"] and found["differs"]
            found["right"] = found["right"] and abs(found["mean_shift"]) < 4
        return found

    def _error(self, requested: Mapping[str, str], precision: str) -> float:
        loss, gradients = self._losses_and_gradients(requested, precision)
        right_loss, right = self.reference
        away = float((gradients - right).norm() / right.norm())
        found = max(away, abs(loss - right_loss) / abs(right_loss))
        return found if math.isfinite(found) else math.inf

    def _losses_and_gradients(
        self, requested: Mapping[str, str], precision: str
    ) -> tuple[float, torch.Tensor]:
        model = self._model(self.setup, requested, precision)
        outputs = model(self.batch)
        loss = torch.stack([output.loss_sum.float() for output in outputs.values()]).sum()
        loss.backward()
        gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        return float(loss.detach()), torch.cat(gradients).cpu()

    def _model(self, setup: Setup, requested: Mapping[str, str], precision: str) -> torch.nn.Module:
        kernels = Kernels(**{**dict(PLAIN), **requested})
        made = setup.changed(precision=precision).model(kernels, self.device)
        return made.to(DTYPES[precision]).train()

    def _dropout_of(self, operation: str, form: str, precision: str) -> str | None:
        """The form of dropout to try with this one, if it has to do with dropout."""
        if operation not in WITH_DROPOUT:
            return form if operation == "dropout" else None
        (each,) = (each for each in IMPLEMENTATIONS[operation] if each.name == form)
        setup = self.setup.changed(dropout=0.1, precision=precision)
        for dropout in ("plain", "counter"):
            if each.unavailable(setup.environment(self.device, dropout)) is None:
                return dropout
        return None

    def _with_dropout(self, requested: Mapping[str, str], precision: str) -> Row:
        setup = self.setup.changed(dropout=0.1)
        model = self._model(setup, requested, precision)
        plain = self._model(setup, {}, precision)
        ours = list(self._draws(model, range(DRAWS)))
        again, others = next(self._draws(model, range(1))), list(self._draws(plain, range(DRAWS)))
        spread = math.hypot(statistics.stdev(ours), statistics.stdev(others)) / math.sqrt(DRAWS)
        shift = (statistics.fmean(ours) - statistics.fmean(others)) / max(spread, 1e-9)
        return {
            "repeats": again == ours[0],
            "differs": len(set(ours)) > DRAWS // 2,
            "mean_shift": round(shift, 2),
        }

    @torch.no_grad()
    def _draws(self, model: torch.nn.Module, seeds: range) -> Iterator[float]:
        for seed in seeds:
            torch.manual_seed(seed)
            outputs = model(replace(self.batch, dropout_key=1000 + seed))
            yield float(sum(output.loss_sum.float() for output in outputs.values()))


def losses(context: Context) -> None:
    """The loss of 50 steps in every precision and ZeRO stage, with fp32 and plain kernels first."""
    setup = Setup(shape="mini", length=128, rows=16, precision="fp32", dropout=0.0, requested=PLAIN)
    steps = 50
    if context.toy:
        setup, steps = setup.changed(shape="toy", length=32, rows=4, words=500), 6
    batches = setup.batches(10)
    reference: list[float] = []

    def curve(changed: Setup, stage: int) -> Row:
        loop = EngineLoop(changed, batches, context.device, stage=stage, workers=0)
        found = torch.stack([loop.step(n).double() for n in range(steps)]).tolist()
        loop.close()
        if not reference:
            reference.extend(found)
        return _compared(found, reference, changed.precision)

    for name, changed, stage in _curves(setup, context):
        names = {"run": name, "stage": stage, "precision": changed.precision}
        context.measure(lambda c=changed, s=stage: curve(c, s), needs=5, **names)


def _curves(setup: Setup, context: Context) -> Iterator[tuple[str, Setup, int]]:
    """What is compared, the most important first. ZeRO 3 changes the process and comes last."""
    chosen = setup.changed(requested=())
    yield "fp32, plain kernels", setup, 0
    half = ("bf16", "fp16") if context.device.type == "cuda" else ("bf16",)
    for precision in half:
        yield f"{precision}, chosen kernels", chosen.changed(precision=precision), 1
    yield "fp32, chosen kernels", chosen, 0
    if not context.toy:
        compiled = (("compile", "on"),)
        yield "fp32, compiled", chosen.changed(requested=compiled), 0
        for precision in half:
            changed = chosen.changed(requested=compiled, precision=precision)
            yield f"{precision}, compiled", changed, 1
    for stage in (0,) if context.toy else (0, 2, 3):
        for precision in half:
            yield f"{precision}, ZeRO {stage}", chosen.changed(precision=precision), stage


def _compared(found: list[float], reference: list[float], precision: str) -> Row:
    pairs = list(zip(found, reference, strict=True))
    away = [abs(a - b) / abs(b) for a, b in pairs]
    return {
        "first": round(found[0], 4),
        "last": round(found[-1], 4),
        "fp32_last": round(reference[-1], 4),
        "mean_difference": statistics.fmean(away),
        "largest_difference": max(away),
        "right": max(away) <= CURVES[precision],
        "losses": [round(loss, 4) for loss in found],
    }


def resume(context: Context) -> None:
    """Weights after 6 steps, and after 3, a checkpoint that was written in the background, a new
    engine and 3 more: bit for bit. Some
    kernels of GPUs add up in another order each time; then a run without a break differs from
    itself too, which is measured."""
    setup = _small(context).changed(dropout=0.1, precision=context.precision)
    batches = setup.batches(6)
    for stage in (1,) if context.toy else (1, 2, 3):
        context.measure(lambda s=stage: _resumed(setup, batches, s, context), needs=8, stage=stage)


def _resumed(setup: Setup, batches: list[Batch], stage: int, context: Context) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        wanted = _weights(setup, batches, stage, context, save_to=folder)
        found = _weights(setup, batches, stage, context, load_from=folder)
    different = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    row: Row = {"right": not different, "tensors": len(wanted), "different": different[:5]}
    if different:
        again = _weights(setup, batches, stage, context)
        row["repeats_without_a_break"] = all(torch.equal(wanted[n], again[n]) for n in wanted)
        row["largest_difference"] = max(float((wanted[n] - found[n]).abs().max()) for n in wanted)
    return row


def _weights(
    setup: Setup,
    batches: list[Batch],
    stage: int,
    context: Context,
    *,
    save_to: str = "",
    load_from: str = "",
) -> dict[str, torch.Tensor]:
    """The weights after 6 steps."""
    first = 3 if load_from else 0
    loop = EngineLoop(setup, batches[first:], context.device, stage=stage, workers=0)
    if load_from:
        loop.engine.load(load_from)
    for number in range(first, 6):
        loop.step(number)
        if save_to and number == 2:
            loop.engine.start_save(save_to, {}, step=3)
    if save_to:
        loop.engine.finish_save()
    found = loop.engine.full_state_dict()
    loop.close()
    return found
