"""Evaluates every task on held-out data: loss, perplexity, accuracy, generated texts, and a
baseline that ignores the text.

Losses over global batches are computed over blocks of held-out examples in their order, so that
they depend neither on the processes nor on the micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from palm_ds.common.sparse_vectors import DenseOrSparse, SparseVectors
from palm_ds.data.stream.decode import Decoded, decoded, gathered
from palm_ds.data.stream.packing import micro_batches
from palm_ds.data.stream.task_group_dataset import (
    BuiltRow,
    PackedRow,
    TaskGroupDataset,
    build_examples,
    collate_built,
    held_out_rows,
)
from palm_ds.data.tasks.task import TableTask, Task
from palm_ds.data.tasks.text_generation import GenerationLimits, TextGenerator, generate_texts
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model, TaskOutput
from palm_ds.runtime.step.grad_cache import GlobalBatchLoss
from palm_ds.train.evaluate.minimal_pairs import PairSet, rows_within_memory
from palm_ds.train.evaluate.probe import Probe
from palm_ds.train.recipe.custom_metrics import Metric, OwnMetrics, own_scores
from palm_ds.train.report.metrics_file import PAIRS, PROBE, set_title

if TYPE_CHECKING:
    from palm_ds.engine import Engine
    from palm_ds.model.inputs.batch import Batch
    from palm_ds.runtime.processes.processes import Processes


BLOCK = 256
"""Examples of a block."""


class ExampleVectors(NamedTuple):
    """The vectors (n, hidden) and targets (n, ...) of one example."""

    task: str
    dataset: int
    number: int
    vectors: DenseOrSparse
    targets: np.ndarray


class LossTotals(NamedTuple):
    """Sums over all held-out examples that have a loss."""

    examples: int
    loss: float
    correct: float


def example_vectors(
    losses: Mapping[str, GlobalBatchLoss],
    built: Sequence[BuiltRow],
    batch: Batch,
    outputs: Mapping[str, Any],
) -> Iterator[ExampleVectors]:
    """Those of a batch, for tasks whose loss is over whole steps."""
    for task, loss in losses.items():
        if task not in batch.labels:
            continue
        sparse = getattr(loss, "sparse", False)
        vectors, used = outputs[task].scores.float().cpu().numpy(), 0
        targets = batch.labels[task][1].cpu().numpy()
        for ref, example in (each for row in built for each in row):
            if task in example.labels:
                own = slice(used, used + len(example.labels[task][0]))
                used = own.stop
                kept = SparseVectors.of(vectors[own]) if sparse else vectors[own]
                yield ExampleVectors(task, ref.dataset, ref.number, kept, targets[own])


def global_batch_losses(
    losses: Mapping[str, GlobalBatchLoss], own: Sequence[ExampleVectors], processes: Processes
) -> dict[str, LossTotals]:
    """{task: sums} of the examples of all processes. Collective."""
    every = sorted(
        (each for part in processes.gather(own) for each in part), key=lambda each: each[:3]
    )
    by_task = {}
    for task, loss in losses.items():
        examples = [each for each in every if each.task == task]
        blocks = [examples[i : i + BLOCK] for i in range(0, len(examples), BLOCK)]
        totals = [_block(loss, block) for block in blocks]
        if totals:
            by_task[task] = LossTotals(*map(sum, zip(*totals, strict=True)))
    return by_task


def _block(loss: GlobalBatchLoss, examples: Sequence[ExampleVectors]) -> LossTotals:
    counts = torch.tensor([len(example.vectors) for example in examples])
    losses, correct = loss.step_losses(
        torch.from_numpy(np.concatenate([_dense(example.vectors) for example in examples])),
        torch.from_numpy(np.concatenate([example.targets for example in examples])),
        torch.arange(len(examples)).repeat_interleave(counts),
    )
    return LossTotals(len(losses), float(losses.sum()), float(correct.sum()))


def _dense(vectors: DenseOrSparse) -> np.ndarray:
    return vectors.toarray() if isinstance(vectors, SparseVectors) else vectors


def generation_eval(
    engine: Engine, datasets: Sequence[TaskGroupDataset], tasks: Mapping[str, Task]
) -> dict[str, tuple[int, dict[int, dict[str, Any]]]]:
    """{task: (dataset, {row: prediction})} of the first dataset of each task that writes texts.
    Collective: all processes get the same."""
    generated: dict[str, tuple[int, dict[int, dict[str, Any]]]] = {}
    for number, dataset in enumerate(datasets):
        for member in dataset.tasks:
            task = tasks[member.name]
            if not isinstance(task, TextGenerator) or member.name in generated:
                continue
            if rows := min(task.evaluate_rows, len(dataset.source)):
                generated[member.name] = number, _written(engine, dataset, task, rows)
    return generated


def _written(
    engine: Engine, dataset: TaskGroupDataset, task: TextGenerator, rows: int
) -> dict[int, dict[str, Any]]:
    """{row: prediction} of the first `rows` rows; each process writes its share, the last ones
    some rows twice."""
    items = np.arange(engine.rank, -(-rows // engine.world) * engine.world, engine.world) % rows
    limits = GenerationLimits(
        length=dataset.max_length, segments=dataset.segments, task_id=dataset.task_id
    )

    lockstep = engine.ds_config.stage == 3 and engine.world > 1

    def write(model: Model) -> list[dict[str, Any]]:
        return generate_texts(
            model,
            task,
            items.tolist(),
            dataset.source,
            limits,
            settings=task.evaluation_decoding,
            batch_tokens=engine.micro_rows * dataset.max_length,
            lockstep=lockstep,
            stop=partial(engine.processes.stop_requested, together=lockstep),
        )

    parts = engine.processes.gather((items.tolist(), engine.apply(write)))
    engine.processes.check_stop()  # some rows may be left out
    return dict(
        sorted(
            ((item, each) for own, made in parts for item, each in zip(own, made, strict=True)),
            key=lambda pair: pair[0],
        )
    )


_NONE: OwnMetrics = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Evaluation result of one task over `count` labels. The baseline ignores the text: see the
    task's `baseline`."""

    count: int
    loss: float
    accuracy: float
    baseline_loss: float
    baseline_accuracy: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The task's own metrics; the first is the primary one."""
    tables: Mapping[str, list[list[Any]]] = field(default_factory=dict)
    """Tables for the report, such as a confusion matrix: {title: rows of cells, header first}."""

    @property
    def value(self) -> float:
        """The primary metric: the task's first one, else the accuracy."""
        return next(iter(self.metrics.values()), self.accuracy)

    @property
    def perplexity(self) -> float:
        """NaN for losses that are no logarithms of probabilities, which have no accuracy either."""
        return math.nan if math.isnan(self.accuracy) else math.exp(min(self.loss, 700.0))

    @property
    def standard_error(self) -> float:
        """Standard error of the accuracy, assuming independent labels."""
        return math.sqrt(max(self.accuracy * (1 - self.accuracy), 0.0) / max(self.count, 1))

    @property
    def standard_errors_above(self) -> float:
        """Distance of the accuracy from the baseline's, in standard errors (the baseline's own if
        the accuracy is 0 or 1)."""
        baseline = self.baseline_accuracy
        error = self.standard_error or math.sqrt(max(baseline * (1 - baseline), 0.0) / self.count)
        return (self.accuracy - baseline) / error if error else 0.0

    def record(self) -> dict[str, Any]:
        """As plain values for metrics.jsonl."""
        return asdict(self) | {
            "perplexity": self.perplexity,
            "standard_error": self.standard_error,
            "standard_errors_above": self.standard_errors_above,
        }


@dataclass(frozen=True)
class HeldOutSet:
    """The held-out examples of every task group, packed once: every evaluation uses the same
    rows."""

    datasets: Sequence[TaskGroupDataset]
    rows: Sequence[PackedRow]
    length: int
    pad: int
    sets: Mapping[str, HeldOutSet] = field(default_factory=dict)
    """The rows of further evaluation sets, by name."""
    mask_rate: float | None = None
    """Of tasks that mask tokens at a rate; None: their own."""
    pairs: PairSet | None = None
    """Minimal pairs to score besides."""
    probe: Probe | None = None
    """Labeled texts whose vectors are probed besides."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to evaluate on."""
        return not (self.rows or self.pairs or self.probe)

    def first_rows_of(self, task: str, rows: int) -> HeldOutSet:
        """Only the first `rows` rows that contain a task."""
        having = {
            n for n, dataset in enumerate(self.datasets) if task in [t.name for t in dataset.tasks]
        }
        return replace(self, rows=[row for row in self.rows if row[0].dataset in having][:rows])

    def batches(
        self, rank: int, world: int, micro_rows: int
    ) -> Iterator[tuple[list[BuiltRow], Batch]]:
        """This process's micro-batches, with their examples. All processes get equally many; the
        last ones may contain empty rows."""
        for part in micro_batches(self.rows, size=micro_rows, rank=rank, world=world):
            built = build_examples(self.datasets, part, self.mask_rate)
            yield built, collate_built(self.datasets, built, self.length, self.pad)


def held_out_set(
    datasets: Sequence[TaskGroupDataset], examples: int, length: int, pad: int
) -> HeldOutSet:
    """Pack the first `examples` held-out examples of every dataset over a corpus, and all of every
    dataset over a table."""
    rows = []
    for number, dataset in enumerate(datasets):
        most = dataset.num_items if dataset.tasks[0].reads == "table" else examples
        rows += held_out_rows(dataset, number, most)
    return HeldOutSet(datasets, rows, length, pad)


def evaluate(
    engine: Engine, data: HeldOutSet, tasks: Mapping[str, Task], own: OwnMetrics = _NONE
) -> dict[str, TaskScore]:
    """Evaluate every task that has labels in the held-out rows; `own`: metrics besides the task's.
    Collective: all processes call it and get the same result. Raises StopRequestedError between two
    batches on all of them within `processes.abandons`."""
    sums = _Sums(tasks, data.datasets)
    sources: list[Any] = [dataset.source for dataset in data.datasets]
    tables = {name: task for name, task in tasks.items() if isinstance(task, TableTask)}
    scored = [x for x in sums.names if x in tables and tables[x].predicts == "scores"]
    pieces: list[Decoded] = []
    losses = {name: loss for name, loss in engine.global_batch.items() if name in sums.names}
    vectors: list[ExampleVectors] = []
    for built, batch in data.batches(engine.rank, engine.world, engine.micro_rows):
        engine.processes.check_stop()
        outputs = engine.evaluate(batch, scored)
        scores = {name: outputs[name].scores for name in scored}
        scores = {name: found for name, found in scores.items() if found is not None}
        vectors += example_vectors(losses, built, batch, outputs)
        pieces += decoded(built, scores, tables, sources)
        sums.add(built, batch, outputs)
    totals = engine.reduce(sums.values) if sums.values else {}
    if losses:
        for name, found in global_batch_losses(losses, vectors, engine.processes).items():
            parts = {"count": found.examples, "loss": found.loss, "right": found.correct}
            totals |= {f"{part} {name}": value for part, value in parts.items()}
    all_pieces = [piece for part in engine.processes.gather(pieces) for piece in part]
    predictions = gathered(all_pieces, tables, sources) | generation_eval(
        engine, data.datasets, tasks
    )

    def more(name: str) -> dict[str, Any]:
        """What the task itself makes of its predictions, or of what its head counted."""
        if name in predictions:
            return _scored(tables[name], *predictions[name], sources, own.get(name, ()))
        tallies = {part: totals[f"tally {part} {name}"] for part in sums.tallied.get(name, ())}
        return sums.scored_by[name].tallied(tallies) if tallies else {}

    def labels(name: str) -> int:
        """Those that are scored: of a task of several task groups over a table, the first's."""
        scored = name in predictions and name not in losses
        return int(scored and totals[f"first {name}"] or totals[f"count {name}"])

    return {
        name: TaskScore(
            **{
                "count": labels(name),
                "loss": totals[f"loss {name}"] / count,
                "accuracy": totals[f"right {name}"] / count,
                "baseline_loss": totals[f"base loss {name}"] / count,
                "baseline_accuracy": totals[f"base right {name}"] / count,
                **more(name),
            }
        )
        for name in sums.scored_by
        if (count := totals[f"count {name}"])
    }


class _Sums:
    """Sums of this process over held-out texts, of each loss of the tasks: `loss NAME`, ..."""

    def __init__(self, tasks: Mapping[str, Task], datasets: Sequence[TaskGroupDataset]):
        self.values: dict[str, torch.Tensor | float] = {}
        self.tallied: dict[str, list[str]] = {}
        """{task: what its head counts}"""
        self.sources: list[Any] = [dataset.source for dataset in datasets]
        self.names = dict.fromkeys(task.name for dataset in datasets for task in dataset.tasks)
        self.scored_by = {
            name: tasks[task] for task in self.names for name in tasks[task].loss_weights()
        }
        """{loss: its task}"""
        pairs = [(task.name, n) for n, dataset in enumerate(datasets) for task in dataset.tasks]
        self._first = dict(reversed(pairs))
        """{task: its first dataset}"""

    def add(
        self, built: Sequence[BuiltRow], batch: Batch, outputs: Mapping[str, TaskOutput]
    ) -> None:
        for name in self.scored_by:
            self._add_baseline(name, built, batch)
            self.tallied[name] = list(outputs[name].tallies)
            for part, value in outputs[name].tallies.items():
                self._add(f"tally {part}", name, value)
            self._add("loss", name, outputs[name].loss_sum)
            self._add("right", name, outputs[name].correct)
            self._add("count", name, float(batch.count(name)))

    def _add_baseline(self, name: str, built: Sequence[BuiltRow], batch: Batch) -> None:
        """Each example has that of the corpus or table that it is from."""
        own = [each for row in built for each in row if name in each.example.labels]
        counts = [len(each.example.labels[name][1]) for each in own]
        numbers = np.array([each.ref.dataset for each in own], np.int64)
        dataset_of = numbers.repeat(np.array(counts, np.int64))
        first = dataset_of == self._first[self.scored_by[name].name]
        self._add("first", name, float(first.sum()))
        targets = batch.labels[name][1].numpy() if name in batch.labels else np.empty(0)
        sums = np.zeros(2)
        for dataset in np.unique(dataset_of).tolist():
            mine = targets[dataset_of == dataset]
            parts = self.scored_by[name].baseline_of(name, mine, self.sources[dataset])
            sums += [float(part.sum()) for part in parts]
        self._add("base loss", name, float(sums[0]))
        self._add("base right", name, float(sums[1]))

    def _add(self, part: str, name: str, value: torch.Tensor | float) -> None:
        self.values[f"{part} {name}"] = self.values.get(f"{part} {name}", 0.0) + value


def evaluate_sets(
    engine: Engine, data: HeldOutSet, tasks: Mapping[str, Task], own: OwnMetrics = _NONE
) -> dict[str, TaskScore]:
    """{"task (set)": score} on every further evaluation set, the minimal pairs and the
    probe. Collective."""
    evaluations = {
        set_title(task, name): score
        for name, rows in data.sets.items()
        for task, score in evaluate(engine, rows, tasks, own).items()
    }
    if data.pairs:
        evaluations[set_title(data.pairs.task, PAIRS)] = _pair_score(
            engine, data.pairs, data.length
        )
    if data.probe:
        evaluations[set_title(data.probe.task, PROBE)] = _probe_score(engine, data.probe)
    return evaluations


def _pair_score(engine: Engine, pairs: PairSet, length: int) -> TaskScore:
    """The accuracy on minimal pairs, in rows of `length` tokens; a paradigm counts as much as any
    other. Collective."""

    def logits(batch: Batch) -> torch.Tensor | None:
        engine.processes.check_stop()
        return engine.evaluate(batch, [pairs.task])[pairs.task].scores

    own = pairs.losses(
        logits,
        length=length,
        rows=rows_within_memory(engine.micro_rows, length, pairs.vocabulary.size),
        rank=engine.rank,
        world=engine.world,
    )
    pair_scores = pairs.scores(np.sum(engine.processes.gather(own), axis=0))
    paradigms = [[name, *paradigm] for name, paradigm in pair_scores.paradigms.items()]
    return TaskScore(
        count=pair_scores.pairs,
        loss=pair_scores.loss,
        accuracy=pair_scores.mean,
        baseline_loss=math.nan,  # a text always counts
        baseline_accuracy=0.5,
        metrics={"accuracy": pair_scores.mean},
        tables={"paradigms": [["paradigm", "pairs", "accuracy"], *paradigms]},
    )


def _probe_score(engine: Engine, probe: Probe) -> TaskScore:
    """The accuracy of a linear classifier of the encoder's vectors. Collective."""

    def read(batch: Batch) -> torch.Tensor:
        engine.processes.check_stop()
        own = batch.to(engine.device)
        return engine.apply(lambda model: probe.vectors_of(model.backbone, own))

    how = {"rows": engine.micro_rows, "rank": engine.rank, "world": engine.world}
    parts = engine.processes.gather(probe.vectors(read, **how))
    # One process fits: no machine's rounding makes processes differ.
    made = probe.score(np.sum(parts, axis=0)) if engine.rank == 0 else None
    score = engine.processes.gather(made)[0]
    assert score is not None
    return TaskScore(
        count=score.rows,
        loss=score.loss,
        accuracy=score.accuracy,
        baseline_loss=score.baseline_loss,
        baseline_accuracy=score.baseline_accuracy,
        metrics={"accuracy": score.accuracy},
        tables={"rows": [["classes", "fitted on", "tested on"], list(score.sizes)]},
    )


def _scored(
    task: TableTask,
    dataset: int,
    predictions: Mapping[int, dict[str, Any]],
    sources: list[Any],
    own: Sequence[Metric],
) -> dict[str, Any]:
    """Metrics and report tables from the predictions of all processes."""
    source = sources[dataset]
    return {
        "metrics": task.metrics(predictions, source) | own_scores(own, task, predictions, source),
        "tables": task.tables(predictions, sources[dataset]),
    }
