"""Compares ONNX files with the checkpoint that they are made from.

checkpoint ──its own library, or palm_ds's encoder──> layers, vectors, scores, tags ─┐
                                                                                ├─> difference
padded batches, and texts alone from 2 tokens to the longest ──ONNX Runtime─────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.model.heads.crf import FORBIDDEN, viterbi
from palm_ds.model.pooling import Pooling
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.convert import parity
from palm_ds.weights.convert.convert import as_runnable
from palm_ds.weights.convert.parity import ParityReport
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.expected_shapes import TRANSITIONS
from palm_ds.weights.formats.onnx.description import OnnxDescription, OnnxHead
from palm_ds.weights.formats.onnx.graph import EMBEDDING
from palm_ds.weights.formats.onnx.run import in_onnx_runtime, word_starts
from palm_ds.weights.formats.runnable import (
    Outputs,
    RunnableCheckpoint,
    Texts,
    last_state,
    read_values,
)

TOLERANCE = {"fp32": 1e-5, "fp16": parity.TOLERANCE[torch.float16], "int8": 0.5}
"""Largest allowed difference relative to the largest value (at least 1). The loss in int8 depends
on the model; above this, most is lost."""


class GraphComparison:
    """The outputs of a checkpoint on some texts, computed once, and those of graphs next to them.

    `allowed`: {head with a CRF: (tags + 2, tags) bool, the transitions of its decoding}. `plain`:
    the checkpoint was opened without options that its own library would not know.
    """

    def __init__(
        self,
        contents: CheckpointContents,
        description: OnnxDescription,
        *,
        tokenizer: Tokenizer | None,
        texts: Sequence[str],
        allowed: Mapping[str, torch.Tensor],
        plain: bool,
    ):
        self.contents, self.about, self.allowed = contents, description, allowed
        self.inputs = _inputs(contents, tokenizer, texts)
        rows = {head.task_id for head in description.heads.values()}
        self.rows = sorted(rows) or [description.task_id]
        self.sources = [self._source(row, plain=plain) for row in self.rows]

    def _source(self, task_id: int, *, plain: bool) -> RunnableCheckpoint:
        """The checkpoint, run once, with the outputs that only the graph has."""
        side = as_runnable(self.contents, task_id, plain=plain)
        run = side.open()
        known: dict[int, Outputs] = {}
        with torch.no_grad():
            for texts in self.inputs:
                known[id(texts)] = self._completed(run(texts), texts)
        return replace(side, open=lambda: lambda texts: known[id(texts)])

    def checked(self, path: Path, precision: str) -> ParityReport:
        """Raises UserError if the outputs differ by more than the tolerance."""
        report = self._report(path, TOLERANCE[precision], tags=precision == "fp32")
        if not report.passed:
            raise UserError(
                f"{self.contents.path}: the outputs of {path.name} differ, so nothing was written: "
                f"{report}"
            )
        return report

    def distance(self, path: Path) -> float:
        """The largest difference relative to the largest value."""
        worst = self._report(path, 1.0, tags=False).worst
        return worst.largest / max(worst.scale, 1.0)

    def _report(self, path: Path, tolerance: float, *, tags: bool) -> ParityReport:
        made = [
            parity.compare(source, self._file(path, row), self.inputs, tolerance=tolerance)
            for source, row in zip(self.sources, self.rows, strict=True)
        ]
        differences = [
            difference
            for each in made
            for difference in each.differences
            if tags or "tags" not in difference.name
        ]
        return replace(made[0], differences=tuple(differences))

    def _file(self, path: Path, task_id: int) -> RunnableCheckpoint:
        return in_onnx_runtime(self.contents, path, self.about, task_id=task_id)

    def agreement(self, path: Path) -> dict[str, float]:
        """{head: the share of equal predictions, over all texts or tokens}"""
        same: dict[str, list[torch.Tensor]] = {}
        for source, row in zip(self.sources, self.rows, strict=True):
            one, other = source.open(), self._file(path, row).open()
            for texts in self.inputs:
                wanted, given = one(texts), other(texts)
                for name, head in self.about.heads.items():
                    key = f"tags {name}" if head.tags else f"head {name}"
                    if key in wanted and (best := _best(wanted[key], head)) is not None:
                        equal = best == _best(given[key], head)
                        same.setdefault(name, []).append(equal.reshape(len(equal), -1).all(1))
        return {name: float(torch.cat(value).float().mean()) for name, value in same.items()}

    def _completed(self, outputs: Outputs, texts: Texts) -> Outputs:
        """With the vectors of whole texts and the tags of CRFs, both computed from texts without
        padding."""
        config, sizes = self.contents.config, texts.real.sum(1).tolist()
        last = outputs[last_state(config)]
        made = dict(outputs)
        if how := self.about.embedding:
            made[EMBEDDING] = torch.stack([_pooled(x, how) for x in last.split(sizes)])
        for name, head in self.about.heads.items():
            if head.tags:
                made[f"tags {name}"] = self._tags(name, outputs[f"head {name}"], texts)
        return made

    def _tags(self, name: str, emissions: torch.Tensor, texts: Texts) -> torch.Tensor:
        """The best tags (tokens,) of the words, -1 at other tokens."""
        at = word_starts(texts)[texts.real].bool()
        text = torch.arange(len(texts.real))[:, None].expand_as(texts.real)[texts.real][at]
        tags = torch.full(at.shape, -1)
        if at.any():
            values = read_values(self.contents, f"heads.{name}.{TRANSITIONS}")
            if name in self.allowed:
                values = values.masked_fill(~self.allowed[name], FORBIDDEN)
            tags[at] = viterbi(emissions[at], values, text.unique(return_inverse=True)[1])
        return tags


def _best(scores: torch.Tensor, head: OnnxHead) -> torch.Tensor | None:
    """Predictions of the scores (n, ...): tags, classes, or each class or not; None for a
    number."""
    if head.tags:
        return scores
    if head.problem_type == "multi_label_classification":
        return scores > 0
    return scores.argmax(-1) if scores.shape[-1] > 1 else None


def _inputs(
    contents: CheckpointContents, tokenizer: Tokenizer | None, texts: Sequence[str]
) -> list[Texts]:
    """Padded batches, random and real; and random texts alone: the longest, and one of 2 tokens."""
    longest = contents.config.max_length
    inputs = parity.inputs_for(contents, contents, tokenizer, texts)
    random = inputs[0]
    times = -(-longest // random.ids.shape[1])
    for length in {longest, min(longest, 2)}:
        inputs.append(
            Texts(
                kind=f"single ({length} tokens)",
                ids=random.ids[:1].repeat(1, times)[:, :length],
                segments=random.segments[:1].repeat(1, times).sort().values[:, :length],
                real=torch.ones(1, length, dtype=torch.bool),
            )
        )
    return inputs


def _pooled(rows: torch.Tensor, how: Pooling) -> torch.Tensor:
    """The vector of a text's tokens (tokens, hidden)."""
    made = {"mean": rows.mean(0), "max": rows.max(0).values, "cls": rows[0]}[how.pooling]
    return F.normalize(made, dim=0) if how.normalize else made
