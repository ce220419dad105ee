"""One forward pass for the texts of many requests, whatever is asked of each.

    examples of several clients ──packed rows──encoder──> the scores of each example, by head

Besides the heads of its tasks a served model has heads that return the encoder's own vectors, so
that predictions, masked words and embeddings share a pass: a text is embedded by a label at its
tokens, like any other label. States of other layers are recorded in the same pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from palm_ds.data.stream.packing import padded_length, rows_to_predict
from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.heads.heads import Head, MaskedLMHead
from palm_ds.model.inputs.batch import EncoderStates
from palm_ds.model.multi_task_model import Model
from palm_ds.model.pooling import OF_ALL_TOKENS, SPLADE, pool

Scores = Mapping[str, np.ndarray]
"""{head's task: (labels, any) float32} of one example; one row if the task pools."""
EVERY_TOKEN = "tokens"
"""Instead of a pooling: the vectors of all tokens."""


class Asked(NamedTuple):
    """A text of a forward pass, and what is wanted of it besides its labels."""

    example: Example
    task_id: int
    layers: tuple[int, ...] = ()
    """Layers below the last, 0 being the embeddings, whose states are wanted."""
    pooling: str = EVERY_TOKEN
    """How these are pooled."""


class VectorHead(Head):
    """Returns the vectors it reads, (n, hidden); with `pooling` the mean or the maximum of those of
    each text, (texts, hidden), or what splade makes of them by a masked-LM head, `words`, (texts,
    vocabulary)."""

    def __init__(self, pooling: str, words: MaskedLMHead | None = None) -> None:
        super().__init__()
        self.words = words if pooling == SPLADE else None
        self.pooled = pooling == "pooler"
        self.one = pooling != EVERY_TOKEN
        """Whether it returns one vector of a text."""
        self.grouped = pooling in OF_ALL_TOKENS
        self.pooling = pooling

    def logits(self, rows: torch.Tensor, groups: torch.Tensor | None = None) -> torch.Tensor:
        if groups is None:
            return rows
        _, lengths = groups.unique_consecutive(return_counts=True)
        if self.words is not None:
            return self.words.text_vectors(rows, lengths.tolist())
        return pool(rows, lengths, self.pooling)


def vectors_task(pooling: str) -> str:
    """The name under which texts are embedded; no task of a recipe can have it."""
    return f"vectors:{pooling}"


def layer_state(number: int) -> str:
    """The name of a layer's state among the scores of an example."""
    return f"layer:{number}"


def with_vector_heads(
    model: Model, poolings: Sequence[str], words: MaskedLMHead | None = None
) -> Model:
    """The same modules, with a head for each pooling and one for all tokens. `words`: the masked-LM
    head of splade."""
    poolings = [*poolings, EVERY_TOKEN]
    heads: dict[str, nn.Module] = dict(model.heads.items())
    heads |= {vectors_task(pooling): VectorHead(pooling, words) for pooling in poolings}
    head_of = model.head_of | {vectors_task(pooling): vectors_task(pooling) for pooling in poolings}
    return Model(model.backbone, heads, head_of).eval()


def label_for_vector(example: Example, pooling: str) -> Example:
    """Asks for the vector of a text, or those of its tokens: labels all of these, or [CLS]."""
    many = len(example) if pooling in (*OF_ALL_TOKENS, EVERY_TOKEN) else 1
    name = vectors_task(pooling)
    example.labels[name] = np.arange(many), np.zeros(many, np.int64)
    if pooling in OF_ALL_TOKENS:
        example.grouped_labels.add(name)
    return example


def scores_of(
    model: Model, asked: Sequence[Asked], *, pad: int, device: torch.device
) -> list[Scores]:
    """The scores of each text, in order, and by `layer_state` the states that it asks for."""
    lengths = np.array([len(each.example) for each in asked])
    rows = rows_to_predict(lengths, model.backbone.kernels.attention)
    length = padded_length(max(int(lengths[row].sum()) for row in rows), device)
    packed = [[(asked[n].example, asked[n].task_id) for n in row] for row in rows]
    batch = collate(packed, length=length, pad=pad)
    numbers = {number for each in asked for number in each.layers}
    wanted = WantedStates(embeddings=0 in numbers, hidden=tuple(sorted(numbers - {0})))
    with torch.inference_mode(), recorded(model.backbone, wanted) as states:
        results = model.scores(batch.to(device), list(batch.labels))
    scores = {task: result.float().cpu().numpy() for task, result in results.items()}
    order = [n for row in rows for n in row]
    by_example = _by_example(model, scores, [asked[n].example for n in order], order)
    if not wanted:
        return by_example
    inside = _states(states, asked, rows, length)
    return [{**own, **more} for own, more in zip(by_example, inside, strict=True)]


def _states(
    states: EncoderStates, asked: Sequence[Asked], rows: Sequence[np.ndarray], length: int
) -> list[Scores]:
    """The states that each text asks for, pooled as it asks."""
    flat = {number: state.flatten(0, 1) for number, state in states.hidden.items()}
    if states.embeddings is not None:
        flat[0] = states.embeddings.flatten(0, 1)
    found: list[Scores] = [{}] * len(asked)
    for number, row in enumerate(rows):
        first = number * length
        for n in row:
            each, many = asked[n], len(asked[n].example)
            own = {k: _pooled(flat[k][first : first + many], each.pooling) for k in each.layers}
            found[n] = {layer_state(k): state.float().cpu().numpy() for k, state in own.items()}
            first += many
    return found


def _pooled(vectors: torch.Tensor, pooling: str) -> torch.Tensor:
    """(1, hidden) of the tokens' vectors, or (tokens, hidden) as they are."""
    if pooling == EVERY_TOKEN:
        return vectors
    return pool(vectors, torch.tensor([len(vectors)], device=vectors.device), pooling)


def _by_example(
    model: Model, scores: Scores, examples: Sequence[Example], order: Sequence[int]
) -> list[Scores]:
    """Each example's part of the scores; `examples` are in the order of the batch."""
    heads = {task: model.heads[model.head_of[task]] for task in scores}
    pooling = {task for task, head in heads.items() if isinstance(head, VectorHead) and head.one}
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
