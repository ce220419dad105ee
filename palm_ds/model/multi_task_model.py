"""The encoder with the heads of all tasks.

Every head runs in every forward pass, in a fixed order, whatever labels the batch has: a head
without labels reads one row of zeros, and its loss is multiplied by 0. ZeRO breaks if ranks or
steps run different modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.rng import derive_key
from palm_ds.model.distillation.distillation import Distillation
from palm_ds.model.distillation.settings import LogitsSettings
from palm_ds.model.distillation.soft_labels import soft_loss, soft_name
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.heads.heads import Head, further_loss
from palm_ds.model.heads.pseudo_tokens import with_pseudo_tokens
from palm_ds.model.heads.replaced_tokens import Generator, generator_name
from palm_ds.model.inputs.batch import Batch, EncoderStates, TeacherOutputs
from palm_ds.model.ops.dropout import dropout, dropout_keys
from palm_ds.model.ops.packed_linear import PackedLinear, packed_form
from palm_ds.model.pooling import pool

_MAX_SHARE = 0.5  # share of a batch's positions above which gathering costs more than it saves


class TaskOutput(NamedTuple):
    """A task's summed loss and number of correct predictions in a batch, and its scores
    (labels, any) if they were requested. If its head's loss is over whole steps: a loss of 0, and
    always the vectors (labels, hidden) that it is computed from, as `scores`."""

    loss_sum: torch.Tensor
    correct: torch.Tensor
    scores: torch.Tensor | None = None
    tallies: Mapping[str, torch.Tensor] = MappingProxyType({})
    """What its head counted, of which the task makes its metrics; outside training only."""


class TaskLabels(NamedTuple):
    """The labels of a task in a batch."""

    positions: torch.Tensor
    """(n,), flat; (2 n,) with those of first tokens behind, if its head reads them, or those of
    first regions and first tokens; or those of all tokens of its texts."""
    targets: torch.Tensor  # (n, ...)
    groups: tuple[Any, ...]
    """The third argument of a grouped head; of one that reads whole texts their lengths."""
    real: int  # 1; 0 for the dummy label of a batch without labels


class Model(nn.Module):
    """`heads` by name, in order; `head_of` maps each task to the name of its head, `pseudo_tokens`
    tasks whose placeholders the encoder fills in to a temperature."""

    def __init__(
        self,
        backbone: Encoder,
        heads: Mapping[str, nn.Module],
        head_of: Mapping[str, str],
        pseudo_tokens: Mapping[str, float] = MappingProxyType({}),
    ):
        super().__init__()
        _check_heads(heads, head_of)
        self.backbone = backbone  # first, so that the tied embeddings have the backbone's name
        self.heads = nn.ModuleDict(heads)
        self.head_of, self.pseudo_tokens = dict(head_of), dict(pseudo_tokens)
        self._further = _further_heads(self.head_of, heads)
        self.distillation: Distillation | None = None
        self.soft = LogitsSettings()
        self.teacher_weights: dict[str, float] = {}
        self._task_of: dict[str, str] = {}
        self.recorded_states = WantedStates()
        self.matched = any(_matches(self._head(task)) for task in head_of)
        self.pooled = any(self.reads_pooler(task) for task in head_of)
        self._sites = {task: derive_key("head", task) >> 1 for task in head_of}

    def reads_pooler(self, task: str) -> bool:
        """Whether the task's head reads vectors after the pooler of tokens."""
        return _matches(self._head(task)) or self.backbone.pools(self._head(task))

    def learn_from_teacher(
        self,
        soft: LogitsSettings,
        weights: Mapping[str, float],
        distillation: Distillation | None,
    ) -> None:
        """Let batches with a teacher's outputs have more losses: those of soft labels, with
        `weights` {task: weight}, and those of its states."""
        self.soft, self.distillation = soft, distillation
        self._task_of = {soft_name(task): task for task in weights}
        self.teacher_weights = {soft_name(task): weight for task, weight in weights.items()}
        if distillation:
            self.recorded_states = distillation.student
            inside = distillation.settings.weights.items()
            self.teacher_weights |= {soft_name(part): weight for part, weight in inside}

    @property
    def losses(self) -> dict[str, bool]:
        """{loss: whether it is over all tokens, instead of labels}: the tasks, their further
        losses, the generators, then what is learned from a teacher."""
        learned = {name: name not in self._task_of for name in self.teacher_weights}
        generators = [generator_name(x) for x, y in self.head_of.items() if y in self.generators]
        return dict.fromkeys([*self.labeled, *generators], False) | learned

    @property
    def labeled(self) -> dict[str, nn.Module]:
        """{loss over labels: its head}: the tasks, then their further losses."""
        return {task: self.heads[head] for task, head in self.head_of.items()} | self._further

    @property
    def generators(self) -> dict[str, Generator]:
        """{head: the generator that makes its texts}"""
        parts = {name: getattr(head, "generator", None) for name, head in self.heads.items()}
        return {name: part for name, part in parts.items() if isinstance(part, Generator)}

    @property
    def encoders(self) -> list[Encoder]:
        """The encoder, then those of generators."""
        return [self.backbone, *(generator.encoder for generator in self.generators.values())]

    def forward(self, batch: Batch | Callable[[Model], Any], scores: Collection[str] = ()) -> Any:
        """{task: TaskOutput}: summed loss and correct predictions of each task, in the order of
        `head_of`; also the scores of those tasks in `scores` that have labels in the batch. With a
        teacher's outputs, also the other `losses`. Of a function instead of a batch: what it makes
        of the model, whose weights ZeRO 3 gathers as in any other forward pass."""
        return self._outputs(batch, scores) if isinstance(batch, Batch) else batch(self)

    def _outputs(self, batch: Batch, scores: Collection[str]) -> dict[str, TaskOutput]:
        batch = with_pseudo_tokens(self.backbone, self.labeled, self.pseudo_tokens, batch)
        batch, generated = _with_samples(self, batch)
        names = [*self.labeled, *(self._task_of if batch.teacher else ())]
        labels = [self._labels(batch, name) for name in names]
        wanted = self.recorded_states if batch.teacher else WantedStates()
        with recorded(self.backbone, wanted) as states:
            pieces = self._read(batch, names, labels)
        outputs = {}
        for task, rows, label in zip(names, pieces, labels, strict=True):
            # A head without labels reads zeros: its scores are finite whatever the encoder returns,
            # and finite times 0 is 0.
            head, rows = self._head(task), self._pool(task, rows * label.real, label)
            rows = self._dropout(task, rows, batch, label.positions)
            if task in self._task_of and batch.teacher:
                outputs[task] = self._soft_output(task, rows, label, batch.teacher)
                continue
            if getattr(head, "global_batch", False):
                rows = head(rows, *label.groups) if _reads_texts(head) else rows
                outputs[task] = _vectors(rows, label)
                continue
            loss, correct = head(rows, label.targets, *label.groups)
            # Every process computes scores, with labels or without: ZeRO 3 gathers weights jointly.
            logits = head.logits(rows, *label.groups) if task in scores else None
            logits = logits if label.real else None
            tallies = {} if self.training else _tallies(head, rows, label)
            outputs[task] = TaskOutput(loss * label.real, correct * label.real, logits, tallies)
        _touch_idle_poolers(self, pieces[0], outputs)
        return outputs | generated | self._learned_inside(states, batch)

    def _soft_output(
        self, name: str, rows: torch.Tensor, labels: TaskLabels, teacher: TeacherOutputs
    ) -> TaskOutput:
        """The output of a task's soft labels."""
        wanted = teacher.words.get(self._task_of[name])
        wanted = labels.targets if wanted is None else wanted
        wanted = wanted if labels.real else None
        loss, correct = soft_loss(self._head(name), rows, labels.groups, wanted, self.soft)
        return TaskOutput(loss * labels.real, correct * labels.real)

    def _learned_inside(self, states: EncoderStates, batch: Batch) -> dict[str, TaskOutput]:
        """The outputs of what is learned of the teacher's states."""
        if not (self.distillation and batch.teacher and batch.teacher.states):
            return {}
        losses = self.distillation(states, batch.teacher.states, batch)
        nothing = torch.full((), torch.nan, device=batch.input_ids.device)
        return {soft_name(part): TaskOutput(loss, nothing) for part, loss in losses.items()}

    def logits(self, batch: Batch, task: str) -> torch.Tensor:
        """Scores (n, any) at the task's positions in `batch.labels`."""
        if task not in self.head_of:
            raise UserError(f'no task "{task}"{suggest(task, self.head_of)}')
        return self.scores(batch, [task])[task]

    def scores(self, batch: Batch, tasks: Collection[str]) -> dict[str, torch.Tensor]:
        """Scores of several tasks, of those that have positions in the batch. Computes only what
        these tasks need."""
        labels = {task: self._labels(batch, task) for task in tasks if task in batch.labels}
        if not labels:
            if batch.memory is not None:
                self.backbone(batch)  # later windows remember this one
            return {}
        pieces = self._read(batch, labels, list(labels.values()), unique=True)
        return {
            task: self._head(task).logits(self._pool(task, piece, label), *label.groups)
            for (task, label), piece in zip(labels.items(), pieces, strict=True)
        }

    def head_rows(
        self, batch: Batch, tasks: Sequence[str]
    ) -> Iterator[tuple[str, torch.Tensor, TaskLabels]]:
        """For each task the rows (n, hidden) that its head reads at its labels, of which there is
        at least a dummy."""
        labels = [self._labels(batch, task) for task in tasks]
        pieces = self._read(batch, tasks, labels) if tasks else [self.backbone(batch)]
        for task, rows, label in zip(tasks, pieces, labels, strict=False):
            yield task, self._pool(task, rows, label), label

    def _labels(self, batch: Batch, task: str) -> TaskLabels:
        """The task's labels; if there are none, a dummy one at position 0."""
        return _task_labels(self._head(task), batch, task)

    def _read(
        self,
        batch: Batch,
        tasks: Collection[str],
        labels: Sequence[TaskLabels],
        unique: bool = False,
    ) -> list[torch.Tensor]:
        """Per task the rows (its labels, hidden) that its head reads, before pooling, or after it
        where the pooler reads each token.

        `unique`: remove repeated positions, which synchronizes with the device."""
        averaged = [
            self._averaged(task) and label.real for task, label in zip(tasks, labels, strict=True)
        ]
        if any(averaged):
            flat = self.backbone(batch).flatten(0, 1)
            early = [self._pools_each_token(task) for task in tasks]
            wanted = {x for x, mean in zip(early, averaged, strict=True) if mean}
            means = {
                x: pool(self.backbone.pooler(flat) if x else flat, batch.sequence_lengths, "mean")
                for x in sorted(wanted)
            }
            return [
                means[x].index_select(0, batch.sequence_of(label.positions))
                if mean
                else flat.index_select(0, label.positions)
                for x, mean, label in zip(early, averaged, labels, strict=True)
            ]
        at = torch.cat([label.positions for label in labels])
        if unique:
            at, index = at.unique(return_inverse=True)
            rows = self.backbone(batch, at).index_select(0, index)
        else:
            rows = self._encode(batch, at)
        return list(rows.split([len(label.positions) for label in labels]))

    def _averaged(self, task: str) -> bool:
        """Whether the task's head reads means over texts."""
        head = self._head(task)
        texts = getattr(head, "pooled", False) and self.backbone.averages_texts
        return texts or getattr(head, "averaged", False)

    def _pools_each_token(self, task: str) -> bool:
        """Whether the task's head reads means over what the pooler makes of tokens."""
        return getattr(self._head(task), "pooled", False) and self.backbone.pools_each_token

    def _encode(self, batch: Batch, at: torch.Tensor) -> torch.Tensor:
        """The vectors (n, hidden) at the flat positions `at` (n,), which may repeat. If these are
        few, the last layer is computed for them only. Repeats are not removed, since counting the
        distinct positions would synchronize with the device."""
        all_layers = self.backbone.config.num_layers in self.recorded_states.hidden
        if len(at) < _MAX_SHARE * batch.input_ids.numel() and not all_layers:
            return self.backbone(batch, at)
        return self.backbone(batch).flatten(0, 1).index_select(0, at)

    def _head(self, task: str) -> Any:
        if task in self._further:
            return self._further[task]
        return self.heads[self.head_of[self._task_of.get(task, task)]]

    def _pool(self, task: str, rows: torch.Tensor, labels: TaskLabels) -> torch.Tensor:
        """Input of the task's head, of the rows that `_read` returns."""
        head = self._head(task)
        if _matches(head):
            return head.hidden_rows(self.backbone.match(rows))
        if getattr(head, "reads_regions", False):
            return self.backbone.of_regions(rows)
        rows = self.backbone.of_texts(rows)
        reader = self.backbone.pooler if self.backbone.pools(head) else head
        rows = _in_dtype_of(reader, rows) if self._averaged(task) else rows
        if reader is head:
            return rows
        pooled = labels.real and self._pools_each_token(task)
        return rows if pooled else self.backbone.pooler(rows)

    def _dropout(
        self, task: str, rows: torch.Tensor, batch: Batch, positions: torch.Tensor
    ) -> torch.Tensor:
        """The dropout of the rows (n, hidden) that a task's head reads, at these flat positions."""
        rate = getattr(self._head(task), "input_dropout", 0.0) if self.training else 0.0
        if not rate or self.backbone.kernels.dropout != "counter":
            return dropout(rows, rate, None)
        keys = dropout_keys(batch, rows.shape[1]).site(self._sites[self._task_of.get(task, task)])
        return dropout(rows, rate, keys.select(positions[-len(rows) :]))


def _touch_idle_poolers(
    model: Model, encoded: torch.Tensor, outputs: dict[str, TaskOutput]
) -> None:
    """Gives a pooler that no head uses a gradient of 0, so that it is treated alike under every
    ZeRO stage."""
    encoder, first = model.backbone, next(iter(outputs))
    idle = [] if model.pooled else [(encoder.pooler, encoder.of_texts)]
    if not model.matched and encoder.region_size(encoder.config):
        idle.append((encoder.image_pooler, encoder.of_regions))
    for pooler, part in idle:
        zero = pooler(part(encoded[:1]).to(_dtype(pooler)) * 0).sum() * 0
        outputs[first] = outputs[first]._replace(loss_sum=outputs[first].loss_sum + zero)


def _matches(head: nn.Module) -> bool:
    """Whether a head compares images with texts."""
    return getattr(head, "matches_images", False)


def _in_dtype_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Means, which are fp32, for a module that reads them; as they are if it has no parameters."""
    parameter = next(module.parameters(), None)
    return rows if parameter is None else rows.to(parameter.dtype)


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _further_heads(
    head_of: Mapping[str, str], heads: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """{further loss of a task: its head}"""
    return {
        further_loss(task, about): head
        for task, name in head_of.items()
        for about, head in getattr(heads[name], "further", {}).items()
    }


def _with_samples(model: Model, batch: Batch) -> tuple[Batch, dict[str, TaskOutput]]:
    """The batch that the encoder reads, and the outputs of generators that wrote in it."""
    outputs = {}
    for name in model.generators:
        tasks = [task for task, its in model.head_of.items() if its == name]
        head: Any = model.heads[name]
        batch, written = head.replace_tokens(batch, tasks)
        outputs |= {loss: TaskOutput(*output) for loss, output in written.items()}
    return batch, outputs


def _vectors(rows: torch.Tensor, labels: TaskLabels) -> TaskOutput:
    """The output of a head whose loss is over whole steps. Its loss of 0 has a gradient of 0, so
    that a batch without labels takes part in the backward pass."""
    vectors = rows.float()
    zero = vectors.sum() * 0
    return TaskOutput(zero, zero.detach(), vectors if labels.real else vectors[:0])


def _check_heads(heads: Mapping[str, nn.Module], head_of: Mapping[str, str]) -> None:
    """Raises UserError for a task without a head, a head without a task, or a second generator."""
    for task, head in head_of.items():
        if head not in heads:
            raise UserError(f'task "{task}": no head "{head}"{suggest(head, heads)}')
    for head in heads:
        if head not in head_of.values():
            raise UserError(f'head "{head}": no task uses it; remove it, or give it a task')
    names = [name for name, head in heads.items() if getattr(head, "generator", None) is not None]
    if len(names) > 1:
        raise UserError(
            f"tasks.{names[1]}: an encoder has one generator, that of tasks.{names[0]}; use it "
            f"with `share: {names[0]}`"
        )


def _task_labels(head: nn.Module, batch: Batch, task: str) -> TaskLabels:
    """The task's labels; if there are none, a dummy one at position 0."""
    grouped = getattr(head, "grouped", False)
    if task in batch.labels and len(batch.labels[task][0]):
        at, targets = batch.labels[task]
        if _reads_texts(head):
            at, lengths = batch.tokens_of(at)
            return TaskLabels(at, targets, (lengths,), 1)
        at = _read_positions(head, batch, at)
        return TaskLabels(at, targets, (batch.groups[task],) if grouped else (), 1)
    zero = torch.zeros(1, dtype=torch.int64, device=batch.input_ids.device)
    target = head.dummy_target(zero.device) if isinstance(head, Head) else zero
    at = zero.repeat(2) if _reads_pairs(head) else zero
    further = ([1],) if _reads_texts(head) else (zero,) if grouped else ()
    return TaskLabels(at, target, further, 0)


def _reads_texts(head: nn.Module) -> bool:
    """Whether a head reads all tokens of the texts of its labels."""
    return getattr(head, "reads_texts", False)


def _reads_pairs(head: nn.Module) -> bool:
    """Whether a head reads two vectors for each label."""
    return _matches(head) or getattr(head, "reads_first", False)


def _read_positions(head: nn.Module, batch: Batch, labels: torch.Tensor) -> torch.Tensor:
    """The positions that a head reads for labels at these (n,)."""
    if _matches(head):
        return torch.cat([batch.first_regions_of(labels), batch.first_of(labels)])
    if getattr(head, "reads_first", False):
        return torch.cat([labels, batch.first_of(labels)])
    return labels


def _tallies(head: Any, rows: torch.Tensor, labels: TaskLabels) -> dict[str, torch.Tensor]:
    """Counts of a head in texts that it is not trained on, if it counts."""
    if not hasattr(head, "tallies"):
        return {}
    counts = head.tallies(rows, labels.targets)
    return {name: value * labels.real for name, value in counts.items()}


def prepare_to_predict(model: Model, device: torch.device | str, dtype: torch.dtype) -> Model:
    """The same model on a device, for nothing but predictions."""
    model.to(device, dtype).eval()
    if torch.device(device).type == "cpu" and packed_form(dtype):
        _pack(model.backbone)
    return model


def _pack(encoder: Encoder) -> None:
    """Pack the matrices of its layers; a user's layer may lack some. The two halves of a gated
    network are multiplied one after the other: what follows reads each whole."""
    matrices = encoder.matrices(encoder.config)
    for layer in encoder.layers:
        modules = dict(layer.named_modules())
        for matrix in matrices:
            if type(linear := modules.get(matrix.path)) is nn.Linear:
                halves = len(matrix.stacked) if matrix.roles == ("intermediate",) else 1
                layer.set_submodule(matrix.path, PackedLinear(linear, halves))
