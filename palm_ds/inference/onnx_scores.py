"""Scores ONNX files on labeled rows, next to the run that they were made from.

    rows ──predictor──> packed batches ─┬─ palm_ds's encoder and heads ─> predictions ─> scores
                                        └─ unpacked, padded, ONNX Runtime ─> ...        ─> scores

Everything but the model is the same: the windows of long texts, the decoding, the metrics.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import TableTask
from palm_ds.inference.predict_files import PredictionJob, open_inputs, predict_files
from palm_ds.inference.predictor import Predictor
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.config.meta import on_meta
from palm_ds.model.encoder.encoder import build_encoder, encoder_class
from palm_ds.model.heads.crf import CRFHead, tag_log_probs
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.train.setup.build import outputs_of
from palm_ds.weights.convert.to_onnx import SOURCE, OnnxRun, Scores
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.onnx.description import (
    FILES,
    FOLDER,
    TOKENS,
    OnnxDescription,
    OnnxHead,
)
from palm_ds.weights.formats.runnable import as_trained

if TYPE_CHECKING:
    from palm_ds.weights.formats.onnx.run import OnnxModel


def run_of(contents: CheckpointContents, files: Sequence[str] = ()) -> OnnxRun:
    """The run of an opened checkpoint, for `convert_to_onnx`. With `files` of labeled rows, the
    written graphs are scored on them. Raises UserError."""
    opened = TrainedModel(contents=contents)
    score = _scorer(opened, files) if files else None
    return OnnxRun(allowed=_allowed_transitions(opened), score=score)


def _scorer(
    opened: TrainedModel, files: Sequence[str]
) -> Callable[[Path, OnnxDescription, Sequence[str]], Scores]:
    """Scores graphs on the rows of `files`, for the tasks that these have the columns of. Raises
    UserError if there is none, or the source is not a run with tasks over tables."""
    try:
        predictor = opened.predictor()
    except UserError as error:
        raise UserError(f"--score needs a run: {error}") from None
    predictor = replace(predictor, tasks=_readable(predictor, files))
    own = _scores(predictor, files)  # before anything is exported

    def score(folder: Path, about: OnnxDescription, precisions: Sequence[str]) -> Scores:
        from palm_ds.weights.formats.onnx.run import OnnxModel

        heads = predictor.model.head_of
        tasks = {
            name: y
            for name, y in predictor.tasks.items()
            if name in own and heads[name] in about.heads
        }
        if not tasks:
            raise UserError(f"--score: the graph has no head of {', '.join(own)}; --head adds it")
        if writing := [name for name, task in tasks.items() if task.predicts == "texts"]:
            raise UserError(f"--score: {writing[0]} writes texts, which a graph alone does not")
        meanings = outputs_of(predictor.recipe, predictor.model)
        outputs = {SOURCE: {name: own[name] for name in tasks}}
        for precision in precisions:
            graph = OnnxModel(folder / FOLDER / FILES[precision], about)
            model = OnnxTasks(predictor.model, graph, meanings)
            outputs[precision] = _scores(replace(predictor, tasks=tasks, model=model), files)
        return _by_metric(outputs)

    return score


def _readable(predictor: Predictor, files: Sequence[str]) -> dict[str, TableTask]:
    """The tasks that can read the files. Raises UserError if none can."""
    readable: list[str] = []
    errors: list[UserError] = []
    for encoder_pass in predictor.passes:
        tasks = {task.name: task for task in encoder_pass.tasks}
        try:
            job = PredictionJob(inputs=files, output=Path())
            open_inputs(replace(predictor, tasks=tasks), job)
            readable += tasks
        except UserError as error:
            errors.append(error)
    if not readable:
        raise UserError(f"--score: {errors[0]}")
    return {name: task for name, task in predictor.tasks.items() if name in readable}


def _scores(predictor: Predictor, files: Sequence[str]) -> dict[str, Mapping[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        done = predict_files(predictor, PredictionJob(inputs=files, output=Path(folder) / "out"))
    assert done is not None, "of one process"
    if not done.scores:
        why = f" ({'; '.join(done.notes)})" if done.notes else ""
        raise UserError(f"--score {', '.join(files)}: no labels to score{why}")
    return dict(done.scores)


def _by_metric(by_task: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Scores:
    """{task: {metric: {name: value}}} from {name: {task: {metric: value}}}."""
    return {
        task: {
            metric: {name: scores[task][metric] for name, scores in by_task.items()}
            for metric in metrics
        }
        for task, metrics in by_task[SOURCE].items()
    }


def _allowed_transitions(opened: TrainedModel) -> dict[str, torch.Tensor]:
    """{head with a CRF: (tags + 2, tags) bool}: the transitions that a run's decoding allows; empty
    for other checkpoints."""
    try:
        recipe = opened.recipe
    except UserError:
        return {}
    with on_meta():
        config = recipe.backbone_config
        sizes = replace(config, vocab_size=config.pad + 1)
        if not encoder_class(config).region_size(config):  # tasks of images need such an encoder
            sizes = replace(sizes, kind="bert", options={})
        backbone = build_encoder(sizes)
        heads = {name: task.head(backbone) for name, task in recipe.built_tasks.items()}
    return {
        name: head.crf.allowed.cpu()
        for name, head in heads.items()
        if isinstance(head, CRFHead) and head.crf.allowed is not None
    }


# ---- the graph in place of the model ----


class OnnxTasks(Model):
    """A run's tasks, scored by a graph in ONNX Runtime."""

    def __init__(self, model: Model, graph: OnnxModel, meanings: Mapping[str, HeadOutputs]):
        super().__init__(model.backbone, dict(model.heads.items()), model.head_of)
        self.graph, self.meanings = graph, meanings

    def scores(self, batch: Batch, tasks: Collection[str]) -> dict[str, torch.Tensor]:
        """As `Model.scores`: the scores at the positions of each task's labels."""
        by_head: dict[str, torch.Tensor] = {}
        for task in (name for name in tasks if name in batch.labels):
            head = self.graph.description.heads[self.head_of[task]]
            texts = _unpacked(batch, batch.labels[task][0].numpy(), self._pad)
            self._check_task_ids(texts, task)
            outputs = self.graph.run(texts.inputs, [*head.outputs, *filter(None, [head.tags])])
            rows = texts.rows(np.stack([outputs[output] for output in head.outputs], -1), head)
            by_head[task] = self._as_trained(task, torch.from_numpy(rows))
            if head.tags:
                tags = torch.from_numpy(texts.rows(outputs[head.tags], head))
                by_head[task] = self._with_tags(task, tags, by_head[task], batch.groups[task])
        return by_head

    @property
    def _pad(self) -> int:
        return self.graph.description.pad

    def _as_trained(self, task: str, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.squeeze(-1) if scores.dim() == 3 else scores
        return as_trained(scores, self.meanings.get(self.head_of[task], HeadOutputs()))

    def _with_tags(
        self, task: str, tags: torch.Tensor, emissions: torch.Tensor, groups: torch.Tensor
    ) -> torch.Tensor:
        """Output of a CRFHead: the best tag, and the log-probability of each."""
        head = self.heads[self.head_of[task]]
        assert isinstance(head, CRFHead)
        shares = tag_log_probs(emissions, head.crf.transitions, groups)
        return torch.cat([tags[:, None].float(), shares], 1)

    def _check_task_ids(self, texts: _Unpacked, task: str) -> None:
        about = self.graph.description
        wanted = int(texts.inputs["task_type_ids"][0, 0])
        fixed = self.backbone.config.task_types and "task_type_ids" not in about.inputs
        if fixed and wanted != about.task_id:
            raise UserError(
                f"--score: task {task!r} reads texts with row {wanted} of the task embedding, the "
                f"graph has row {about.task_id}; give --task {wanted}"
            )


@dataclass(frozen=True, kw_only=True)
class _Unpacked:
    """Texts of a packed batch, padded, and where some of its positions are in them."""

    inputs: Mapping[str, np.ndarray]
    text: np.ndarray  # (n,)
    place: np.ndarray  # (n,) in the text

    def rows(self, values: np.ndarray, head: OnnxHead) -> np.ndarray:
        """The values of a head at the positions, (n, ...)."""
        return values[self.text, self.place] if head.reads == TOKENS else values[self.text]


def _unpacked(batch: Batch, positions: np.ndarray, pad: int) -> _Unpacked:
    """The texts that have one of these flat positions."""
    starts = batch.cu_seqlens[:-1].numpy().astype(np.int64)
    lengths = np.diff(batch.cu_seqlens.numpy())
    segment = np.searchsorted(starts, positions, side="right") - 1
    used, text = np.unique(segment, return_inverse=True)
    places = np.arange(lengths[used].max())
    real = places < lengths[used, None]
    at = np.where(real, starts[used, None] + places, 0)

    def padded(values: torch.Tensor, padding: int) -> np.ndarray:
        return np.where(real, values.flatten().numpy()[at], padding)

    place = positions - starts[segment]
    words = np.zeros_like(real, dtype=np.int64)
    words[text, place] = 1
    inputs = {
        "input_ids": padded(batch.input_ids, pad),
        "attention_mask": real.astype(np.int64),
        "token_type_ids": padded(batch.token_type_ids, 0),
        "task_type_ids": np.broadcast_to(padded(batch.task_ids, 0)[:, :1], real.shape).copy(),
        "word_mask": words,
    }
    return _Unpacked(inputs=inputs, text=text, place=place)
