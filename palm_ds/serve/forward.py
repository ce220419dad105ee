"""One forward pass for the texts of many requests, whatever is asked of each.

    examples of several clients ──packed rows──encoder──> the scores of each example, by head

Besides the heads of its tasks a served model has heads that return the encoder's own vectors, so
that predictions, masked words and embeddings share a pass: a text is embedded by a label at its
tokens, like any other label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from palm_ds.data.stream.packing import padded_length, rows_to_predict
from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.heads.heads import Head
from palm_ds.model.multi_task_model import Model
from palm_ds.model.pooling import OF_ALL_TOKENS, pool

Scores = Mapping[str, np.ndarray]
"""{head's task: (labels, any) float32} of one example; one row if the task pools."""


class VectorHead(Head):
    """Returns the vectors it reads, (n, hidden); with `pooling` the mean or the maximum of those of
    each text, (texts, hidden)."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.pooled = pooling == "pooler"
        self.grouped = pooling in OF_ALL_TOKENS
        self.pooling = pooling

    def logits(self, rows: torch.Tensor, groups: torch.Tensor | None = None) -> torch.Tensor:
        if groups is None:
            return rows
        _, lengths = groups.unique_consecutive(return_counts=True)
        return pool(rows, lengths, self.pooling)


def vectors_task(pooling: str) -> str:
    """The name under which texts are embedded; no task of a recipe can have it."""
    return f"vectors:{pooling}"


def with_vector_heads(model: Model, poolings: Sequence[str]) -> Model:
    """The same modules, with a head for each pooling."""
    heads: dict[str, nn.Module] = dict(model.heads.items())
    heads |= {vectors_task(pooling): VectorHead(pooling) for pooling in poolings}
    head_of = model.head_of | {vectors_task(pooling): vectors_task(pooling) for pooling in poolings}
    return Model(model.backbone, heads, head_of).eval()


def label_for_vector(example: Example, pooling: str) -> Example:
    """Asks for the vector of a text: labels all its tokens, or [CLS]."""
    many = len(example) if pooling in OF_ALL_TOKENS else 1
    name = vectors_task(pooling)
    example.labels[name] = np.arange(many), np.zeros(many, np.int64)
    if pooling in OF_ALL_TOKENS:
        example.grouped_labels.add(name)
    return example


def scores_of(
    model: Model, examples: Sequence[tuple[Example, int]], *, pad: int, device: torch.device
) -> list[Scores]:
    """The scores of each (example, row of the task embedding), in order."""
    lengths = np.array([len(example) for example, _ in examples])
    rows = rows_to_predict(lengths, model.backbone.kernels.attention)
    length = padded_length(max(int(lengths[row].sum()) for row in rows), device)
    batch = collate([[examples[n] for n in row] for row in rows], length=length, pad=pad)
    with torch.inference_mode():
        results = model.scores(batch.to(device), list(batch.labels))
    scores = {task: result.float().cpu().numpy() for task, result in results.items()}
    order = [n for row in rows for n in row]
    return _by_example(model, scores, [examples[n][0] for n in order], order)


def _by_example(
    model: Model, scores: Scores, examples: Sequence[Example], order: Sequence[int]
) -> list[Scores]:
    """Each example's part of the scores; `examples` are in the order of the batch."""
    pooling = {task for task in scores if isinstance(model.heads[model.head_of[task]], VectorHead)}
    used = dict.fromkeys(scores, 0)
    by_example: list[Scores] = [{}] * len(order)
    for number, example in zip(order, examples, strict=True):
        own: dict[str, np.ndarray] = {}
        for task, (at, _) in example.labels.items():
            if many := min(len(at), 1) if task in pooling else len(at):
                own[task] = scores[task][used[task] : used[task] + many]
                used[task] += many
        by_example[number] = own
    return by_example
