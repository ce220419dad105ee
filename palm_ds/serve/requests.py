"""From the texts of a request to work for the model, and from its scores to the answer.

    predict_work    rows ──decoded, or written, by their task──> as of `palm-ds predict`
    embed_work      texts, or ids ──> vectors, as of `palm-ds embed`
    fill_work       texts with [MASK] ──> the most probable tokens

Work is prepared on a thread of the server, before it is queued; mistakes in it are found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table
from palm_ds.data.reader.options import ONLY_NAMED, without_labels
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.decode import Decoded, gathered
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import TableTask
from palm_ds.data.tasks.text_generation import TextGenerator, generate_texts
from palm_ds.inference.embedder import EmbeddingSettings, Text
from palm_ds.inference.fill_mask import Filled, Filler, MaskedText, as_record
from palm_ds.inference.predictor import EncoderPass
from palm_ds.inference.search.vectors import unit
from palm_ds.model.inputs.batch import PackedText
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.splade import largest
from palm_ds.serve.forward import EVERY_TOKEN, Scores, label_for_vector, layer_state, vectors_task
from palm_ds.serve.limits import RequestError, ServingLimits
from palm_ds.serve.scheduler import Work
from palm_ds.serve.served_model import ServedModel
from palm_ds.serve.token_ids import TokenIds, sample_row

Row = Mapping[str, Any]
Input = str | Sequence[str] | Row
"""A text, a pair of texts (for tagging: a list of words), or a row by role or column."""
_MAX_DEPTH = 8  # lists and objects within a value


# ---- rows ----


def rows_of(inputs: Sequence[Input], task: TableTask, each: EncoderPass) -> list[Row]:
    """The inputs as rows by role. A row may use the roles' names (`text_a`) or those of the
    training tables' columns. Raises UserError for more texts than the task reads."""
    return [_row(value, task, each, f"inputs[{n}]") for n, value in enumerate(inputs)]


def _row(value: Input, task: TableTask, each: EncoderPass, place: str) -> Row:
    if not isinstance(value, Mapping):
        try:
            return task.row_of(value)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
    roles = {column: role for role, column in each.read.columns.items() if isinstance(column, str)}
    return {
        roles[key] if key in roles and roles[key] not in value else key: cell
        for key, cell in value.items()
    }


def check_rows(rows: Sequence[Row], limits: ServingLimits, name: str = "inputs") -> None:
    """Raises RequestError for too many rows, and for empty or long texts."""
    if not rows:
        raise RequestError(422, f"{name}: empty; give at least one text")
    if len(rows) > limits.max_texts:
        raise RequestError(
            413, f"{name}: {len(rows):,} texts; at most {limits.max_texts:,} in a request"
        )
    for number, row in enumerate(rows):
        for key, value in row.items():
            place = f"{name}[{number}]" if len(row) == 1 else f"{name}[{number}].{key}"
            check_text(value, place, limits)


def _check_images(rows: Sequence[Row]) -> None:
    """Raises UserError for the name of an image, which is a file of the server."""
    for number, row in enumerate(rows):
        if isinstance(row.get("image"), str | int):
            raise UserError(
                f"inputs[{number}].image: a name; give the regions themselves: {{width, height, "
                "boxes, features}"
            )


def check_text(value: object, place: str, limits: ServingLimits) -> None:
    """Raises RequestError for an empty text, one with a NUL, and a long text or list."""
    if isinstance(value, str) and not value.strip():
        raise RequestError(422, f"{place}: the text is empty")
    if isinstance(value, str) and "\0" in value:
        raise RequestError(422, f"{place}: NUL at character {value.index(chr(0)) + 1}")
    size = _characters(value, place)
    if size > limits.max_characters:
        raise RequestError(
            413, f"{place}: {size:,} characters; at most {limits.max_characters:,} in a text"
        )


def _characters(value: object, place: str, depth: int = 0) -> int:
    """Length of a value in characters; what is no text counts as one."""
    if depth > _MAX_DEPTH:
        raise RequestError(422, f"{place}: nested too deeply")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(max(_characters(item, place, depth + 1), 1) for item in value)
    return len(value) if isinstance(value, str) else 0


# ---- predictions ----


def predict_work(model: ServedModel, task: str, inputs: Sequence[Input] | TokenIds) -> Work:
    """Rows or ids for a task; the answer is (predictions, truncated rows). Raises UserError for
    what it cannot read."""
    assert model.predictor is not None
    predictor, each = model.predictor, model.passes[task]
    own = model.tasks[task]
    if isinstance(own, TextGenerator):
        if isinstance(inputs, TokenIds):
            raise UserError(f"{inputs.name}: ids are not read by tasks that write; send `inputs`")
        return _write_work(model, own, _source_of(model, task, rows_of(inputs, own, each)))
    if isinstance(inputs, TokenIds):
        rows = [sample_row(own)] * len(inputs)
    else:
        rows = rows_of(inputs, own, each)
    source = _source_of(model, task, rows)
    built = predictor.examples(each, source)
    # counting costs as much as arranging: only where a row may have been too long
    most = getattr(each.input_task, "max_length", 0) or predictor.recipe.length
    if isinstance(inputs, TokenIds):
        inputs.in_place_of(built, inputs.packed(model, most))
    whole = isinstance(inputs, TokenIds) or all(len(one.example) < most for one in built)
    cut = 0 if whole else each.input_task.cut_rows(source, predictor.recipe.length)

    def finish(scores: Sequence[Scores]) -> tuple[list[dict[str, Any]], int]:
        pieces = [
            Decoded(
                task,
                0,
                one.example.item,
                one.ref.number,
                own.decode(score[task], one.example, source),
            )
            for one, score in zip(built, scores, strict=True)
            if task in score
        ]
        _, predictions = gathered(pieces, model.tasks, [source]).get(task, (0, {}))
        return [own.shown(predictions.get(item, {})) for item in range(len(rows))], cut

    examples = [one.example for one in built]
    return Work(model=model, examples=examples, task_id=each.task_id, finish=finish)


def _source_of(model: ServedModel, task: str, rows: Sequence[Row]) -> TableSource:
    """Rows by role as a table. Raises UserError for what the task cannot read."""
    assert model.predictor is not None
    each = model.passes[task]
    _check_images(rows)
    named = {role: role for role in ONLY_NAMED if any(role in row for row in rows)}
    read = replace(
        each.read, columns=named, format="auto", drop={}, bad_rows="stop", split="", header=True
    )
    source = model.predictor.source(Table.from_rows(rows, without_labels(read), name="inputs"))
    for checked in (each.input_task, *each.tasks):
        checked.check(source, labeled=False)
    return source


def _write_work(model: ServedModel, task: TextGenerator, source: TableSource) -> Work:
    """Texts for rows; the answer is as of `predict_work`."""
    assert model.predictor is not None
    limits = model.predictor.limits(model.passes[task.name])
    prompts = task.prompts(np.arange(len(source)), source, limits)
    cut = task.cut_sources(source, limits)

    def write(replica: Model, number: int) -> dict[str, Any]:
        how = {"settings": task.decoding, "batch_tokens": model.batch_tokens}
        (text,) = generate_texts(replica, task, [number], source, limits, **how)
        return text

    return Work(
        model=model,
        examples=[_plain(prompt.source) for prompt in prompts],
        task_id=limits.task_id,
        write=write,
        finish=lambda texts: (list(texts), cut),
    )


# ---- vectors ----


def embed_work(
    model: ServedModel, texts: Sequence[Text] | TokenIds, settings: EmbeddingSettings
) -> Work:
    """Texts and pairs, or ids; the answer is (vectors, tokens of each text, truncated texts). The
    vectors are (texts, size) float32, or for each text (tokens, size)."""
    pooling = EVERY_TOKEN if settings.tokens else settings.pooling or "mean"
    # the maximum of a mean is no mean of maxima
    late = pooling == "max" and len(settings.layers) > 1 and not settings.concat
    pooling = EVERY_TOKEN if late else pooling
    encoded, cut = _encoded(model, texts, settings)
    examples = [label_for_vector(_plain(encoding), pooling) for encoding in encoded]
    embedder = replace(model.embedder, settings=settings)
    last = len(embedder.encoder.computed_layers) if settings.layers != (-1,) else 0
    layers = [number % (last + 1) for number in settings.layers] if last else []
    names = [vectors_task(pooling) if n == last else layer_state(n) for n in layers]

    def vectors_of(score: Scores) -> np.ndarray:
        """(1, size), or of every token."""
        own = [score[name] for name in names or [vectors_task(pooling)]]
        joined = np.concatenate(own, 1) if settings.concat else np.mean(own, 0)
        joined = joined.max(0, keepdims=True) if late else joined
        vectors = np.ascontiguousarray(joined[:, : embedder.size], np.float32)
        vectors = unit(vectors) if settings.normalize else vectors
        most = settings.max_active_dims if embedder.sparse else 0
        return largest(torch.from_numpy(vectors), most).numpy() if most else vectors

    def finish(scores: Sequence[Scores]) -> tuple[Any, list[int], int]:
        found = [vectors_of(score) for score in scores]
        tokens = [len(encoding.input_ids) for encoding in encoded]
        return (found if settings.tokens else np.concatenate(found)), tokens, cut

    return Work(
        model=model,
        examples=examples,
        task_id=model.task_ids.get(settings.task, model.embedder.task_id),
        layers=tuple(n for n in dict.fromkeys(layers) if n != last),
        pooling=pooling,
        finish=finish,
    )


def _encoded(
    model: ServedModel, texts: Sequence[Text] | TokenIds, settings: EmbeddingSettings
) -> tuple[list[PackedText], int]:
    """The texts with special tokens, and how many were truncated."""
    most = settings.max_length or model.embedder.settings.max_length or 0
    if isinstance(texts, TokenIds):
        return texts.packed(model, most), 0
    embedder = replace(model.embedder, settings=replace(settings, max_length=most))
    return embedder.encode_counting(texts)


def check_numbers(work: Work, settings: EmbeddingSettings, limits: ServingLimits) -> Work:
    """The work. Raises RequestError for an answer of too many numbers."""
    size = replace(work.model.embedder, settings=settings).size
    many = sum(map(len, work.examples)) if settings.tokens else len(work.examples)
    if many * size > limits.max_numbers:
        raise RequestError(
            413,
            f"{many:,} vectors of {size:,} numbers; at most {limits.max_numbers:,} numbers in an "
            "answer",
        )
    return work


def _plain(text: PackedText) -> Example:
    """A text or a pair, without labels."""
    return Example(
        input_ids=text.input_ids,
        token_type_ids=text.token_type_ids,
        source_offsets=np.zeros(len(text.input_ids), np.int64),
        annotations={},
    )


# ---- masked words ----


def fill_work(model: ServedModel, texts: Sequence[str], top: int) -> Work:
    """Texts with `[MASK]`; the answer is a record for each, as `palm-ds fill-mask --json` prints
    them. Raises UserError for a text without a mask or with too many tokens."""
    filler = model.filler
    assert filler is not None
    masked = [_masked(filler, text, f"texts[{n}]") for n, text in enumerate(texts)]
    examples = [_plain(model.embedder.encoded(each.ids)) for each in masked]
    for example, each in zip(examples, masked, strict=True):
        filler.label(example, each.at, filler.task)

    def record(text: str, each: MaskedText, scores: Scores) -> dict[str, Any]:
        probabilities = torch.from_numpy(scores[filler.task]).softmax(-1)
        guesses = filler.best_guesses(probabilities, each.at, each.truths, top=top)
        return as_record(filler, text, Filled(each.ids, guesses))

    def finish(scores: Sequence[Scores]) -> list[dict[str, Any]]:
        return [record(*text) for text in zip(texts, masked, scores, strict=True)]

    return Work(model=model, examples=examples, task_id=filler.task_id, finish=finish)


def _masked(filler: Filler, text: str, place: str) -> MaskedText:
    try:
        return filler.masked(text)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


# ---- tokens ----


def tokens_of(model: ServedModel, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The ids of each text, their names, and the characters of each token (0 to 0 for special
    ones)."""
    special = model.tokenizer.vocabulary
    answers = []
    for ids, spans in model.tokenizer.encode_spans(texts):
        every = [special.cls, *ids.tolist(), special.sep]
        answers.append(
            {
                "ids": every,
                "tokens": model.tokenizer.tokens(every),
                "spans": [[0, 0], *spans.tolist(), [0, 0]],
            }
        )
    return answers
