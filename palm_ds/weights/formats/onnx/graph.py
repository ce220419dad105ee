"""A checkpoint as one module over padded texts, which torch traces into a graph.

    input_ids, attention_mask, token_type_ids  (batch, length)
        └─ encoder ─┬─ last_hidden_state
                    ├─ pooler_output ─ heads of whole texts
                    ├─ sentence_embedding
                    ├─ mean ─ heads of means
                    └─ heads of tokens

It is palm_ds's own encoder: padding is a sequence of its own, which no text attends to. Positions
are counted over the tokens, so texts may be padded on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.pooling import SPLADE, Pooling, pool_padded
from palm_ds.weights.formats.contents import NEXT_SENTENCE_CLASSES, CheckpointContents, HeadInfo
from palm_ds.weights.formats.huggingface.sentence_transformers import embedding_length, modules_of
from palm_ds.weights.formats.onnx.description import MEANS, TEXTS, TOKENS, OnnxDescription, OnnxHead
from palm_ds.weights.formats.runnable import ClassScores, has_pooler, load_encoder, load_masked_lm

LAST, POOLED, EMBEDDING = "last_hidden_state", "pooler_output", "sentence_embedding"
TASKS, WORD_STARTS = "task_type_ids", "word_mask"
_ANSWERS = "ForQuestionAnswering"
NO_SPARSE = "its vectors are sparse (SPLADE), which graphs do not compute; use the folder itself"


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """Contents of a graph to be written."""

    description: OnnxDescription
    notes: tuple[str, ...]
    skipped: Mapping[str, str]
    """{parameter that the graph lacks, or of which it has one row: why}"""


def plan_graph(
    contents: CheckpointContents, heads: Sequence[str], *, opset: int, task_id: int | None
) -> GraphPlan:
    """Choose the heads and the outputs of a graph.

    `heads`: all but masked-LM heads if empty, or the only head. `task_id`: the row of the task
    embedding of every head; None: of the tasks that they were trained for, of `export_task` for the
    vectors. Raises UserError.
    """
    config = contents.config
    chosen = _chosen(contents, heads)
    embedding, notes = _embedding(contents)
    ids = {name: _task_of(contents, name, task_id) for name in chosen}
    rows = {*ids.values()} or {contents.task_id if task_id is None else task_id}
    several = len(chosen) > 1
    skipped = {
        name: "of a head that is not exported; --head names those that are"
        for name in contents.entries
        if name.startswith("heads.") and name.split(".")[1] not in chosen
    }
    if len(rows) == 1 < config.task_types:
        skipped["backbone.task.weight"] = (
            f"its rows other than {min(rows)}, of {config.task_types}: all texts get that row"
        )
    described = {
        name: _described(name, head, several=several, task_id=ids[name])
        for name, head in chosen.items()
    }
    inputs = ["input_ids", "attention_mask"]
    inputs += ["token_type_ids"] if config.token_types > 1 else []
    inputs += [TASKS] if len(rows) > 1 else []
    inputs += [WORD_STARTS] if any(head.tags for head in described.values()) else []
    outputs = [
        LAST,
        *([POOLED] if has_pooler(contents) else []),
        *([EMBEDDING] if embedding else []),
    ]
    outputs += [name for head in described.values() for name in head.outputs]
    outputs += [head.tags for head in described.values() if head.tags]
    return GraphPlan(
        description=OnnxDescription(
            opset=opset,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            hidden_size=config.hidden_size,
            max_length=config.max_length,
            pad=config.pad,
            task_id=0 if len(rows) > 1 else rows.pop(),
            heads=described,
            embedding=embedding,
            custom=not encoder_class(config).is_specified(),
        ),
        notes=notes,
        skipped=skipped,
    )


def _chosen(contents: CheckpointContents, names: Sequence[str]) -> dict[str, HeadInfo]:
    heads = {x: head for x, head in contents.heads.items() if head.kind != "replaced_tokens"}
    for name in names:
        if name not in heads:
            known = suggest(name, heads) if heads else "; it has no heads"
            raise UserError(f"{contents.path}: head: no {name!r}{known}")
        if heads[name].outputs.images:
            raise UserError(
                f"{contents.path}: head {name!r} reads images, but graphs read only texts; "
                "predict, palm.load and serve read both"
            )
    heads = {name: head for name, head in heads.items() if not head.outputs.images}
    usual = [x for x, head in heads.items() if head.kind == "classes"] or [*heads]
    chosen = {x: head for x, head in heads.items() if x in (names or usual)}
    every = encoder_class(contents.config).pools_tokens
    reads = {name: _reads(head) for name, head in chosen.items()}
    pools = [
        name
        for name, head in chosen.items()
        if reads[name] == TEXTS or (every and head.kind == "classes" and reads[name] == TOKENS)
    ]
    for name in pools if not has_pooler(contents) else ():
        if name in names:
            raise UserError(f"{contents.path}: head {name!r} needs a pooler, which is missing")
        del chosen[name]
    return chosen


def _reads(head: HeadInfo) -> str:
    whole = MEANS if head.outputs.averaged else TEXTS
    return whole if head.pooled else TOKENS


def _task_of(contents: CheckpointContents, head: str, task_id: int | None) -> int:
    if task_id is not None or not contents.config.task_types:
        return task_id or 0
    return contents.task_ids.get(head, contents.task_id)


def _described(name: str, head: HeadInfo, *, several: bool, task_id: int) -> OnnxHead:
    end = f"_{name}" if several else ""
    answers = head.outputs.head_class == _ANSWERS and head.classes == 2
    parts = ("start_logits", "end_logits") if answers else ("logits",)
    labels = head.outputs.labels
    return OnnxHead(
        outputs=tuple(part + end for part in parts),
        kind=head.kind,
        reads=_reads(head),
        labels=labels[::-1] if labels == NEXT_SENTENCE_CLASSES else labels,
        problem_type=head.outputs.problem_type,
        head_class=head.outputs.head_class,
        task_id=task_id,
        tags=f"tags{end}" if head.transitions else "",
    )


def _embedding(contents: CheckpointContents) -> tuple[Pooling | None, tuple[str, ...]]:
    stated = modules_of(contents)
    if stated.other:
        what = f"depend on {stated.other} of sentence-transformers"
        return None, (f"no {EMBEDDING} in the graph: its vectors {what}",)
    if stated.pooling == SPLADE:
        return None, (f"no {EMBEDDING} in the graph: {NO_SPARSE}",)
    made = Pooling(
        pooling=stated.pooling or "mean",
        normalize=stated.normalize,
        max_length=embedding_length(contents),
    )
    return made, ()


# ---- the module ----


class PaddedModel(nn.Module):
    """The encoder, pooling and heads of a checkpoint, called with the inputs of the description in
    their order (without `word_mask`). Returns the outputs in their order, without tags."""

    def __init__(self, contents: CheckpointContents, description: OnnxDescription):
        super().__init__()
        self.about = description
        self.encoder = load_encoder(contents, Kernels(attention="sdpa"))
        self.pools = has_pooler(contents)
        self.heads = nn.ModuleList(
            _ExportedHead(contents, name, self.encoder) for name in description.heads
        )

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.traced_inputs, given, strict=True))
        real = values["attention_mask"] > 0  # (batch, length)
        last = self.encoder(self._batch(values, real))
        outputs = [last]
        pooled = self.encoder.pooled_texts(last, real) if self.pools else None
        if pooled is not None:
            outputs.append(pooled)
        if how := self.about.embedding:
            outputs.append(pool_padded(last, real, how))
        for head, about in zip(self.heads, self.about.heads.values(), strict=True):
            scores = head(self._rows(last, pooled, real, about))
            outputs += scores.unbind(-1) if len(about.outputs) == 2 else [scores]
        return tuple(outputs)

    def _rows(
        self, last: torch.Tensor, pooled: torch.Tensor | None, real: torch.Tensor, head: OnnxHead
    ) -> torch.Tensor | None:
        """The rows (..., hidden) that a head reads."""
        if head.reads == TEXTS:
            return pooled
        if head.reads == MEANS:
            return pool_padded(last, real, Pooling(pooling="mean"))
        pools = self.encoder.pools_tokens and head.kind == "classes"
        return self.encoder.pooler(last) if pools else last

    @property
    def traced_inputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.about.inputs if name != WORD_STARTS)

    @property
    def traced_outputs(self) -> tuple[str, ...]:
        tags = {head.tags for head in self.about.heads.values()}
        return tuple(name for name in self.about.outputs if name not in tags)

    def _batch(self, values: Mapping[str, torch.Tensor], real: torch.Tensor) -> Batch:
        """The texts as rows of one sequence each; padding is another sequence."""
        ids = values["input_ids"]
        nothing = torch.zeros_like(ids)
        return Batch(
            input_ids=ids,
            position_ids=(real.long().cumsum(1) - 1).clamp(min=0),
            token_type_ids=values.get("token_type_ids", nothing),
            task_ids=values.get(TASKS, nothing + self.about.task_id),
            sequence_ids=torch.where(real, 0, -1),
            cu_seqlens=ids.new_zeros(1, dtype=torch.int32),  # sdpa needs the mask alone
        )


class _ExportedHead(nn.Module):
    """A head's scores of rows (..., hidden), as other programs expect them."""

    def __init__(self, contents: CheckpointContents, name: str, encoder: nn.Module):
        super().__init__()
        self.masked_lm = self.classes = None
        if contents.heads[name].kind == "masked_words":
            self.masked_lm = load_masked_lm(contents, name, encoder)  # type: ignore[arg-type]
        else:
            self.classes = ClassScores(contents, name)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.masked_lm is not None:
            return self.masked_lm.logits(rows)
        assert self.classes is not None
        return self.classes(rows)
