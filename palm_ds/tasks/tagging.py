"""Sequence tagging of words: named entities, slots, chunks, parts of speech.

[CLS] tokens of the words [SEP]; the label of a word is at its first token. Words come from
`tokens`, or from a text that is split into words or characters and labeled with character spans. A
long sentence is read in several windows; each word is predicted where it has the most context. So
every word gets a tag, and all are trained on.

PaddlePALM's and ERNIE's sequence labeling; with `crf: true` the tags of a sentence are scored
jointly (palm_ds/model/heads/crf.py). PaddlePALM trains the transitions with a learning rate of
1e-3; here use `head_lr`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Rate
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.data.tasks.interfaces import Form, text_field
from palm_ds.data.tasks.masking import class_prior_baseline
from palm_ds.data.tasks.task import Task
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.crf import CRFHead, viterbi
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.heads.outputs import ExportedHead
from palm_ds.tasks.metrics.chunks import as_tag, chunks, convert, split_tag
from palm_ds.tasks.shared import tag_schemes
from palm_ds.tasks.shared.tag_scoring import TagScoring
from palm_ds.tasks.shared.word_windows import (
    WindowWords,
    joined,
    windows,
    words_in_text,
    words_in_window,
)

_VITERBI_BATCH = 256  # sentences per Viterbi batch


@dataclass(frozen=True, kw_only=True)
class Tagging(TagScoring):
    """Predicts a tag for every word."""

    crf: bool = False
    """Score the tags of a sentence jointly with a CRF."""
    constrain: bool = False
    """Predict only sequences of tags that the scheme allows."""
    overlap: NonNegativeInt = 0
    """Minimum overlap of the windows of a long sentence, in tokens; 0: a quarter of a window."""
    dropout: Rate = 0.1
    """Dropout on the input of the head during training."""

    imports = "tokens"

    def with_head_of(self, origin: Task) -> Tagging:
        task = super().with_head_of(origin)
        if self.crf != getattr(origin, "crf", None):
            raise UserError(
                f"{self.where}.crf: differs from that of tasks.{origin.name}, which owns the "
                "shared head"
            )
        return task

    # ---- windows ----

    def items(self, source: TableSource, max_length: int) -> np.ndarray:
        """(windows, 3): row, its tokens [first, last)."""
        words, most = self.words(source), self.input_length(max_length) - 2
        overlap = self.overlap or most // 4
        if overlap >= most:
            raise UserError(f"{self.where}.overlap: {overlap} tokens, but windows have only {most}")
        return windows(words, most, overlap)

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        item, first, last = items.T
        return layouts(last - first + 2, item=item, first=first, last=last)

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        item, first, last = (int(layout[name]) for name in ("item", "first", "last"))
        example = build_input(
            [self.words(source).tokens.read(item, first, last)], source.vocabulary
        )
        example.item = item
        return example

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        """Labels the first token of each word; in a text without words [CLS], so that it has a
        prediction."""
        seen = self._seen(example, source)
        if self.crf:
            example.grouped_labels.add(self.name)
        if not len(seen.words):
            nothing = self.labels.index("O") if "O" in self.labels else 0
            example.labels[self.name] = np.zeros(1, np.int64), np.array([nothing])
            return
        mine = self.targets(source)[self.words(source).of(example.item)]
        example.labels[self.name] = seen.positions, np.maximum(mine[seen.words], 0)

    def _seen(self, example: Example, source: TableSource) -> WindowWords:
        """The words of the first text of the example, which this task or another task of the task
        group has built."""
        words, row = self.words(source), source.row(example.item)
        if seen := words_in_window(example, words):
            return seen
        (column,) = self.columns_of(source)
        mine = row[column] if isinstance(row[column], str) else " ".join(row[column])
        if mine == row.get("text_a"):
            seen = words_in_text(example, words, source.encoded("text_a"))
        if not seen:
            raise UserError(
                f"{source.where(example.item)}: {self.where}: its words are not those of the text "
                "that another task of the task group builds; put it first in the task group, "
                f"or let that task read `texts: [{column}]`"
            )
        return seen

    # ---- head and predictions ----

    def head(self, backbone: Encoder) -> ClassHead | CRFHead:
        if not self.crf:
            return ClassHead(
                backbone.hidden_size,
                len(self.labels),
                dropout=self.dropout,
                init_range=backbone.config.init_range,
            )
        allowed = torch.from_numpy(self._allowed()) if self._constrains else None
        return CRFHead(
            backbone.hidden_size,
            len(self.labels),
            dropout=self.dropout,
            allowed=allowed,
            init_range=backbone.config.init_range,
        )

    @property
    def _constrains(self) -> bool:
        return self.constrain and self.trained != tag_schemes.NONE

    def _allowed(self) -> np.ndarray:
        return tag_schemes.allowed(self.labels, self.trained)

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        known = self.targets(source)
        counts = np.bincount(known[known >= 0], minlength=len(self.labels))
        losses, right = class_prior_baseline(targets, counts)
        return losses, right * np.nan if self.crf else right  # CRF accuracy is per sentence

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        """Predictions of one window: its words, their context, their best tags and log
        probabilities. `gather` combines them."""
        seen = self._seen(example, source)
        scores = scores[: len(seen.words)].astype(np.float64)
        if self.crf:
            best, shares = scores[:, 0].astype(np.int64), scores[:, 1:]
        else:
            best, shares = scores.argmax(1), scores - np.logaddexp.reduce(scores, 1, keepdims=True)
        kept = shares if self._constrains else shares[np.arange(len(best)), best]
        return {
            "words": seen.words.tolist(),
            "context": seen.context.tolist(),
            "best": best.tolist(),
            "shares": kept.tolist(),
        }

    def gather(
        self, pieces: Mapping[int, Sequence[dict[str, Any]]], source: TableSource
    ) -> dict[int, dict[str, Any]]:
        """{"tags", "probs"}, one per word; for texts without tokens also the words ("tokens") and
        the "spans". A word that another task of the task group truncated gets O and 0."""
        items = list(pieces)
        sizes = np.diff(self.words(source).starts)
        sentences = [joined(pieces[item], sizes[item]) for item in items]
        if self._constrains:
            self._choose_allowed(sentences)
        return {
            item: self._prediction(best, shares, item, source)
            for item, (best, shares) in zip(items, sentences, strict=True)
        }

    def _choose_allowed(self, paths: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Replaces invalid tag sequences by the best valid ones."""
        allowed = self._allowed()
        invalid = [(b, s) for b, s in paths if (b >= 0).all() and not _is_allowed(b, allowed)]
        transitions = torch.from_numpy(np.where(allowed, 0.0, -1e4))
        for i in range(0, len(invalid), _VITERBI_BATCH):
            some = invalid[i : i + _VITERBI_BATCH]
            scores = torch.from_numpy(np.concatenate([np.maximum(s, -1e3) for _, s in some]))
            sizes = torch.tensor([len(best) for best, _ in some])
            groups = torch.repeat_interleave(torch.arange(len(some)), sizes)
            chosen = viterbi(scores, transitions, groups).split(sizes.tolist())
            for (best, _), tags in zip(some, chosen, strict=True):
                best[:] = tags.numpy()

    def _prediction(
        self, best: np.ndarray, shares: np.ndarray, item: int, source: TableSource
    ) -> dict[str, Any]:
        nothing = "O" if "O" in self.labels else self.labels[0]
        names = [self.labels[int(i)] if i >= 0 else nothing for i in best]
        if self.written != tag_schemes.NONE:
            names = convert(names, self.written)
        if shares.ndim == 2:
            shares = shares[np.arange(len(best)), best]
        made: dict[str, Any] = {
            "tags": names,
            "probs": [round(float(x), 6) for x in np.exp(np.minimum(shares, 0.0))],
        }
        (column,) = self.columns_of(source)
        text = source.row(item)[column]
        if isinstance(text, str):
            words = self.words(source)
            places = words.spans[words.of(item)]
            made["tokens"] = [text[start:end] for start, end in places]
            if self.written != tag_schemes.NONE:
                made["spans"] = tag_schemes.spans_of_chunks(chunks(names), places)
        return made

    def row_of(self, texts: str | Sequence[str]) -> dict[str, Any]:
        """A list of texts is one of words."""
        return super().row_of(texts) if isinstance(texts, str) else {"tokens": list(texts)}

    def form(self) -> Form:
        field = text_field(self.texts[0] if self.texts else "text_a")
        return Form(about="Labels words and spans.", fields=(field,), shows="spans")

    @classmethod
    def imported(cls, labels: Sequence[str]) -> dict[str, Any]:
        """With the scheme that the labels are of."""
        scheme = tag_schemes.NONE
        if tag_schemes.of_chunks([labels]):
            labels = [as_tag(*split_tag(label)) for label in labels]
            scheme = "BIOES" if any(label[:2] in ("E-", "S-") for label in labels) else "BIO"
        return {"labels": list(labels), "scheme": scheme, "units": "words"}

    def hf_export(self) -> ExportedHead | None:
        return None if self.crf else self.exported()


def _is_allowed(best: np.ndarray, allowed: np.ndarray) -> bool:
    if not len(best):
        return True
    inside = allowed[2 + best[:-1], best[1:]].all()
    return bool(allowed[0, best[0]] and inside and allowed[1, best[-1]])
