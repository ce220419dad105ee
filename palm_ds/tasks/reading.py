"""Reading comprehension: extracts the answer to a question from a context (SQuAD, CMRC2018, DRCD).

[CLS] question [SEP] window of the context [SEP]; a long context is read in overlapping windows; the
best span of all windows is the answer, as text of the original context. Like PaddlePALM's MRC head
and BERT's run_squad.py, each token has two scores, as start and as end of the answer, each with a
softmax over the window.

An encoder with memories reads all windows of a context, each with the question behind it, as in
ERNIE-Doc's code: [CLS] window of the context [SEP] question [SEP]. Those without the answer then
have [CLS] as target.

    predictions {item: {"text", "start", "score", "n_best": [...], "null_odds"}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource, TokenizedColumn
from palm_ds.data.tasks.documents import WindowPlace
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.data.tasks.interfaces import QUESTION, Form, FormField, StoredPrediction
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import ClassHead, HeadOutput
from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.tasks.metrics.answers import cmrc, squad_v1, squad_v2
from palm_ds.tasks.shared.answer_spans import join_windows, trimmed
from palm_ds.tasks.shared.reading_task import ReadingTask, impossible_rows
from palm_ds.tasks.shared.sliding_windows import best_spans, cut, different, most_context

_RULES = {"squad1": squad_v1, "squad2": squad_v2, "cmrc": cmrc}
_WINDOW = ("item", "query", "first", "last", "size", "step")
"""The columns of `items`, and the fields of a layout."""


@dataclass(frozen=True, kw_only=True)
class Reading(ReadingTask):
    """Extracts answers from a context."""

    imports = "answer"
    documents = "also"
    labels_windows = "every"
    packed_settings = ("stride", "max_length")

    # -- examples --

    def items(self, source: TableSource, max_length: int) -> np.ndarray:
        """(windows, 6): row, tokens of the question, tokens [first, last) of the context, window
        size and stride for that context."""
        question, context = (source.encoded(column) for column in self.columns_of(source))
        query = np.minimum(question.lengths, self.max_query)
        sizes = self.input_length(max_length) - source.vocabulary.around(2) - query
        if len(sizes) and sizes.min() < 1:
            raise UserError(
                f"{self.where}: {self.input_length(max_length)} tokens leave no room for a context "
                f"with a question of {query.max()}; raise `max_length` and `length` or "
                "lower `max_query`"
            )
        row, *rest = cut(context.lengths, sizes, self.stride)
        return np.column_stack([row, query[row], *rest])

    def training_items(self, source: TableSource, max_length: int) -> np.ndarray:
        """`items` without the windows that have no training target: those without the answer, or,
        if questions may be unanswerable, those of rows with an answer that was not found."""
        items = self.items(source, max_length)
        answers = self.answers(source)
        held = answers.within(items[:, 0], items[:, 2], items[:, 3])
        if self.may_refuse(source):
            known = (np.diff(answers.starts) > 0) | impossible_rows(source)
            held |= known[items[:, 0]]
        if not held.any():
            raise UserError(f"{self.where}: no window of {source.name} contains an answer")
        return items[held]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """The columns of `items`, by name."""
        total = source.vocabulary.around(2) + items[:, 1] + items[:, 3] - items[:, 2]
        fields = dict(zip(_WINDOW, items.T, strict=True))
        return layouts(total, **fields)

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        """A window. If the context has several, the mark `most_context` flags the tokens with the
        most context in this one."""
        item, query, first, last, size, step = (int(layout[name]) for name in _WINDOW)
        question, context = (source.encoded(column) for column in self.texts)
        pieces = [question.read(item, 0, query), context.read(item, first, last)]
        example = build_input(pieces, source.vocabulary)
        example.item = item
        place = WindowPlace(first, last, size, step, int(context.lengths[item]))
        _mark_context(example, len(example) - 1 - (last - first), place)
        return example

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        """(tokens, 2): 1 at the start and at the end of the answer. No answer has both at [CLS];
        all 0 if there is no training target."""
        targets = np.zeros((len(example), 2), np.int64)
        at, places = self._window(example, source)
        answers = self.answers(source).of(example.item)
        first, last = (places[0], places[-1]) if len(places) else (0, -1)
        held = _within(answers, first, last)
        if len(held):
            drawn = rng.integers(len(held)) if self.answer == "random" else 0
            begin, end = at[held[drawn] - first]
            targets[begin, 0] = targets[end, 1] = 1
        elif self.may_refuse(source) and (len(answers) or impossible_rows(source)[example.item]):
            targets[0] = 1
        example.labels[self.name] = np.arange(len(example)), targets
        example.grouped_labels.add(self.name)

    def repeated(self, layouts: np.ndarray) -> np.ndarray | None:
        return layouts["query"]

    def adapt_window(self, window: Example, place: WindowPlace, source: TableSource) -> None:
        """The target of a window without that of its document is another answer in it, or else
        [CLS]. All tokens have one type, as in ERNIE's code."""
        window.token_type_ids[:] = 0
        _mark_context(window, 1, place)
        answers = self.answers(source).of(window.item)
        if self.name not in window.labels or not len(answers):
            return
        _, targets = window.labels[self.name]
        if not targets.any(0).all():
            held = _within(answers, place.first, place.last - 1)
            begin, end = held[0] - place.first + 1 if len(held) else (0, 0)
            targets[:] = 0
            targets[begin, 0] = targets[end, 1] = 1

    def _window(self, example: Example, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the context tokens in the example and in the context, whichever task built
        the example."""
        encoded, item = source.encoded(self.texts[1]), example.item
        at = np.flatnonzero(example.source_offsets >= 0)
        for run in reversed(np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)):
            places = encoded.place(item, example.source_offsets[run])
            if _is_read(encoded, item, places, example.unmasked_ids[run]):
                return run, places
        if encoded.lengths[item]:
            raise UserError(
                f"{self.where}: another task of the task group builds the texts and leaves out the "
                f"{self.texts[1]}; name {self.name} first in the task group"
            )
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def head(self, backbone: Encoder) -> SpanHead:
        return SpanHead(
            backbone.hidden_size,
            2,
            dropout=self.dropout,
            init_range=backbone.config.init_range,
        )

    # -- predictions --

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        """Predictions of a window: `null`, the scores of no answer, and `found`: [start score, end
        score, first character, end character] of its best distinct answers."""
        scores = scores.astype(np.float64)
        at, places = self._window(example, source)
        mark = example.annotations.get("most_context", np.ones(len(example)))
        longest, most = self.longest(source), 2 * self.n_best
        while True:
            spans = best_spans(*scores[at].T, longest=longest, most=most, allowed=mark[at] > 0)
            candidates, enough = self._different(places[spans], example.item, source)
            if enough or len(spans) < most:
                break
            most *= 4
        logits = np.take_along_axis(scores[at], spans, 0)[list(candidates)]  # (candidates, 2)
        listed = [
            [*pair, *candidates[k]] for k, pair in zip(candidates, logits.tolist(), strict=True)
        ]
        return {"null": scores[0].tolist(), "found": listed}

    def _different(
        self, spans: np.ndarray, item: int, source: TableSource
    ) -> tuple[dict[int, tuple[int, int]], bool]:
        """{index of a span: characters of the context} of the spans with distinct texts, and
        whether there are `n_best` of them."""
        column = self.texts[1]
        context, characters = source.column(column)[item], source.encoded(column).spans_of(item)
        ranges = [
            trimmed(context, characters[first, 0], characters[last, 1]) for first, last in spans
        ]
        kept = different([context[start:end] for start, end in ranges], self.n_best)
        return {number: ranges[number] for number in kept}, len(kept) == self.n_best

    def gather(
        self, pieces: Mapping[int, Sequence[dict[str, Any]]], source: TableSource
    ) -> dict[int, dict[str, Any]]:
        contexts = source.column(self.texts[1])
        threshold = self.null_threshold if self.may_refuse(source) else None
        return {
            item: join_windows(
                windows, contexts[item], n_best=self.n_best, null_threshold=threshold
            )
            for item, windows in pieces.items()
        }

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Scores by the rules of `score`, over the predicted questions."""
        if self.label_column not in source.columns:
            return {}
        answers = source.column(self.label_column)
        wanted = {str(i): [each["text"] for each in answers[i] or ()] for i in predictions}
        rules = self.rules(source)
        odds_known = all("null_odds" in prediction for prediction in predictions.values())
        if rules == "squad2" and self.may_refuse(source) and odds_known:
            texts = {str(i): _best_text(prediction) for i, prediction in predictions.items()}
            odds = {str(i): prediction["null_odds"] for i, prediction in predictions.items()}
            metrics = squad_v2(texts, wanted, odds, self.null_threshold)
        else:
            metrics = _RULES[rules](
                {str(i): prediction["text"] for i, prediction in predictions.items()}, wanted
            )
        return {k: v for k, v in metrics.items() if not k.endswith(("total", "skipped"))}

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        return {**stored.values, "text": str(stored.value("text"))}

    def head_outputs(self) -> HeadOutputs:
        return HeadOutputs(head_class="ForQuestionAnswering")

    def form(self) -> Form:
        question, context = self.texts
        asked = FormField(
            name="question", role=question, label="question", lines=1, value=QUESTION, short=True
        )
        read = FormField(name="context", role=context, label="context", lines=6)
        about = "Finds the answer to a question in a text."
        return Form(about=about, fields=(asked, read), shows="answer")

    @classmethod
    def imported(cls, labels: Sequence[str]) -> dict[str, Any]:
        return {"unanswerable": False, "max_answer": 30, "score": "squad1"}

    def hf_export(self) -> ExportedHead:
        return self.exported()

    def prediction_files(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, Any]:
        """{file name: JSON content} in the format of PaddlePALM and the official scripts: the
        answer, the n-best list and the no-answer odds, by question id (or row number)."""
        ids = source.column("id") if "id" in source.columns else source.numbers
        name = {item: str(ids[item]) for item in predictions}
        listed = {name[i]: prediction["n_best"] for i, prediction in predictions.items()}
        odds = {
            name[i]: prediction["null_odds"]
            for i, prediction in predictions.items()
            if "null_odds" in prediction
        }
        return {
            "predictions.json": {
                name[i]: prediction["text"] for i, prediction in predictions.items()
            },
            "nbest_predictions.json": listed,
            **({"null_odds.json": odds} if odds else {}),
        }


class SpanHead(ClassHead):
    """Two scores per token: as start and as end of the answer. The loss of a window is the mean of
    the two cross-entropies over its tokens; 0 without a target."""

    grouped = True
    soft = "groups"

    def forward(  # type: ignore[override]
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        logits = self.logits(rows, groups).float()  # (n, 2)
        peak, total = _of_windows(logits, groups)
        loss = (peak + total.log() - logits) * targets
        right = targets * (logits.detach() >= peak).to(targets.dtype)
        right = torch.zeros_like(right).index_add_(0, groups, right)  # (windows and empty, 2)
        return HeadOutput(loss.sum() / 2, (right > 0).all(1).sum())

    def logits(  # type: ignore[override]
        self, rows: torch.Tensor, groups: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().logits(rows)  # (n, 2)

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, 2, dtype=torch.int64, device=device)


def _of_windows(logits: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row (n, k): the highest score in its window, and the sum of exp(score - highest).

    Allocates one slot per row, as there are at most that many windows: this avoids waiting for the
    device to count them. The sums do not depend on the order of threads."""
    index = groups[:, None].expand_as(logits)
    floor = torch.full_like(logits, -torch.inf)
    peak = floor.scatter_reduce(0, index, logits.detach(), "amax").index_select(0, groups)
    sizes = torch.zeros_like(groups).index_add_(0, groups, torch.ones_like(groups))
    shares = (logits - peak).exp()
    total = torch.segment_reduce(shares, "sum", lengths=sizes, initial=0.0, unsafe=True)
    return peak, total.index_select(0, groups)


def _within(answers: np.ndarray, first: int, last: int) -> np.ndarray:
    """The answers (n, 2) between two tokens of the context."""
    return answers[(answers[:, 0] >= first) & (answers[:, 1] <= last)]


def _mark_context(example: Example, begin: int, place: WindowPlace) -> None:
    """Flags the tokens with the most context in this window, which stand from `begin` on, if there
    are other windows."""
    first, last, size, step, length = place
    if last - first < length:
        mark = example.annotations["most_context"] = np.zeros(len(example), np.uint8)
        mark[begin : begin + last - first] = most_context(
            first, last, size=size, step=step, length=length
        )


def _best_text(prediction: Mapping[str, Any]) -> str:
    """The best non-empty answer."""
    return next((answer["text"] for answer in prediction["n_best"] if answer["text"]), "")


def _is_read(encoded: TokenizedColumn, item: int, places: np.ndarray, ids: np.ndarray) -> bool:
    """Whether a text has these tokens at these places."""
    if not len(places) or places[0] < 0 or places[-1] >= encoded.lengths[item]:
        return False
    return bool((encoded.read(item).ids[places] == ids).all())
