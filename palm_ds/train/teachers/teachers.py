"""Teachers: models that are not trained, whose outputs the trained model learns.

    batch ──teacher 1, teacher 2, ...──> the same batch with their mean scores as soft labels, and
                                         the states of one of them

They read the same packed rows, without dropout and without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from palm_ds.model.distillation.soft_labels import scores_of, soft_name, word_scores
from palm_ds.model.distillation.soft_vocabulary_loss import MeanScores, top_scores
from palm_ds.model.encoder.states import recorded
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch, EncoderStates, TeacherOutputs, VocabularyScores
from palm_ds.model.multi_task_model import Model

Scores: TypeAlias = torch.Tensor | VocabularyScores
"""Of a head (n, any), or of the vocabulary."""


def always_whole(module: nn.Module) -> AbstractContextManager[None]:
    """The weights of a module that are not shared out."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """One teacher. Its model has a head for each of the tasks that it teaches."""

    model: Model
    weight: float = 1.0
    task_rows: Mapping[int, int] | None = None
    """{row of the student's task embedding: row of its own}; None: it has no task embedding."""
    whole: Callable[[nn.Module], AbstractContextManager[None]] = always_whole
    """A context in which a module has its weights, where they are shared out."""

    def read(self, batch: Batch) -> tuple[EncoderStates, dict[str, Scores]]:
        """Its states, and its scores at the soft labels of its tasks; of a task without labels
        those of a dummy. All processes that share its weights call it."""
        model, tasks = self.model, list(self.model.head_of)
        scores: dict[str, Scores] = {}
        with recorded(model.backbone, model.recorded_states) as states:
            for task, rows, labels in model.head_rows(self._own(batch), tasks):
                head = model.heads[model.head_of[task]]
                with self.whole(head):
                    words = isinstance(head, MaskedLMHead)
                    scores[task] = (
                        word_scores(head, rows) if words else scores_of(head, rows, labels.groups)
                    )
        return states, scores

    def _own(self, batch: Batch) -> Batch:
        """The batch as this model reads it, the positions of soft labels as those of its tasks."""
        types = self.model.backbone.config.token_types
        names = {task: soft_name(task) for task in self.model.head_of}
        own = {task: name for task, name in names.items() if name in batch.labels}
        return replace(
            batch,
            token_type_ids=batch.token_type_ids.clamp(max=types - 1),
            task_ids=self._task_ids(batch.task_ids),
            labels={task: batch.labels[name] for task, name in own.items()},
            groups={t: batch.groups[name] for t, name in own.items() if name in batch.groups},
            dropout_key=None,
        )

    def _task_ids(self, ids: torch.Tensor) -> torch.Tensor:
        numbers = torch.zeros_like(ids)
        for student, own in (self.task_rows or {}).items():
            numbers.masked_fill_(ids == student, own)
        return numbers


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """All teachers of a run; called with a batch and its step."""

    teachers: Sequence[Teacher]
    states_of: int = 0
    """The one whose states are learned."""
    top_k: int = 0
    """For masked words, the number of tokens kept; 0: all."""
    vocabulary: int = 0
    """Tokens of the student's vocabulary."""

    @torch.no_grad()
    def __call__(self, batch: Batch, step: int) -> Batch:
        states = EncoderStates()
        scores: dict[str, list[tuple[float, Scores]]] = {}
        for number, teacher in enumerate(self.teachers):
            own_states, each = teacher.read(batch)
            states = own_states if number == self.states_of else states
            for task, values in each.items():
                scores.setdefault(task, []).append((teacher.weight, values))
        labels, words = dict(batch.labels), {}
        for task, parts in scores.items():
            name = soft_name(task)
            if isinstance(parts[0][1], torch.Tensor):
                if name in labels:
                    labels[name] = labels[name][0], _mean(parts)
            else:
                words[task] = self._words(parts, batch.input_ids.device)
        outputs = TeacherOutputs(states=states, words=words)
        return replace(batch, labels=labels, teacher=outputs)

    def _words(
        self, parts: Sequence[tuple[float, Scores]], device: torch.device
    ) -> VocabularyScores:
        total = sum(weight for weight, _ in parts)
        weighted = [(w / total, x) for w, x in parts if not isinstance(x, torch.Tensor)]
        mean = weighted[0][1] if len(weighted) == 1 else MeanScores(weighted)
        return top_scores(mean, self.top_k, self.vocabulary, device) if self.top_k else mean


def _mean(parts: Sequence[tuple[float, Scores]]) -> torch.Tensor:
    """The weighted mean of scores (n, any), fp32."""
    total = sum(weight for weight, _ in parts)
    weighted = [
        values.float() * (w / total) for w, values in parts if isinstance(values, torch.Tensor)
    ]
    return torch.stack(weighted).sum(0)
