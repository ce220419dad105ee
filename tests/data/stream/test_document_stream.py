"""Documents cut into windows, and slots that read them, against brute force."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.data.stream.document_stream import DocumentStream
from palm_ds.data.stream.stages import StepSize
from palm_ds.data.stream.task_group_dataset import make_datasets
from palm_ds.data.stream.windows import (
    ALONE,
    LONGEST,
    DocumentDataset,
    DocumentSettings,
    DocumentWindows,
)
from palm_ds.data.tasks.task import build
from palm_ds.train.evaluate.documents import held_out_documents
from tests.helpers.small_corpus import write_small_corpus

ORDER, WORDS = "segment_reordering", "knowledge_masking"
GROUP = f"{ORDER} + {WORDS}"
LENGTH, ROWS = 32, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(write_small_corpus(folder, documents=20), 0.0, ("word",))[0]


def dataset_of(
    source: CorpusSource, *, fixed: bool = False, shifted: bool = False, **settings: Any
) -> DocumentDataset:
    tasks = {
        ORDER: build(ORDER, {"source": "text"}),
        WORDS: build(WORDS, {"source": "text", "units": ["word"], "shifted": shifted}),
    }
    parts = {"text": [("c", source, 1.0)]}
    made, _ = make_datasets(
        [GROUP], tasks, {ORDER: 0, WORDS: 1}, parts, seed=3, length=LONGEST, fixed=fixed
    )
    windows = DocumentWindows.of(DocumentSettings(**settings), LENGTH, 12)
    return DocumentDataset.of(made[0], windows)


def stream_of(source: CorpusSource, **settings: Any) -> DocumentStream:
    stages = [{GROUP: 40}, {GROUP: 30}]
    return DocumentStream(
        curriculum=read_stages(stages, (ORDER, WORDS)),
        datasets=[dataset_of(source, **settings)],
        mixtures=[{GROUP: [(0, 1.0)]}] * 2,
        sizes=[StepSize(LENGTH, ROWS)] * 2,
        seed=3,
        pad=source.vocabulary.pad,
    )


@pytest.mark.parametrize("stride", [1, 12, 29, 30, 31])
def test_windows_are_those_of_ernies_reader(stride: int) -> None:
    """As its loop cuts them: windows begin `stride` tokens apart, until one reaches the end."""
    room = LENGTH - 2
    windows = DocumentWindows.of(DocumentSettings(stride=stride), LENGTH, 12)
    for tokens in range(1, 200):
        spans, start = [], 0
        while start < tokens:
            length = min(tokens - start, room)
            spans.append((start, start + length))
            if start + length == tokens:
                break
            start += min(length, stride)
        count = int(windows.count(np.array(tokens), ALONE))
        assert [windows.place(number, tokens, ALONE)[:2] for number in range(count)] == spans
    assert DocumentWindows.of(DocumentSettings(), LENGTH, 12).stride == 12


@pytest.mark.parametrize("counted", ["last", "all"])
def test_a_document_is_labeled_before_it_is_cut(source: CorpusSource, counted: str) -> None:
    """Every window is a piece of the same masked document; labels are where they were in it."""
    dataset = dataset_of(source, counted=counted)
    special = source.vocabulary
    for n, layout in enumerate(dataset.layouts(np.arange(12))):
        whole = super(DocumentDataset, dataset).example(n, layout)
        where, targets = whole.labels[WORDS]
        body, wanted = whole.input_ids[1:-1], dict(zip((where - 1).tolist(), targets, strict=True))
        windows = int(dataset.windows.count(np.array(len(body)), ALONE))
        assert int(dataset.counts(layout[None])[0]) == 2 * windows
        for number in range(2 * windows):
            layout["window"] = number
            example = dataset.example(n, layout)
            start, end = dataset.windows.place(number % windows, len(body), ALONE)[:2]
            padding = [special.pad] * (LENGTH - 2 - (end - start))
            expected = [*body[start:end], special.sep, *padding, special.cls]
            assert example.input_ids.tolist() == expected
            counts = counted == "all" or number >= windows
            at, words = example.labels.get(WORDS, (np.array([]), np.array([])))
            found = dict(zip(at.tolist(), words.tolist(), strict=True))
            inside = {at - start: word for at, word in wanted.items() if start <= at < end}
            assert found == (inside if counts else {}) and (counts or not example.labels)
            last = number == 2 * windows - 1
            of_whole = example.labels.get(ORDER, (np.array([]),))[0].tolist()
            assert of_whole == ([LENGTH - 1] if last else [])
            if last:
                assert example.labels[ORDER][1] == whole.labels[ORDER][1]


def test_a_shifted_word_is_predicted_at_the_place_before_it(source: CorpusSource) -> None:
    """Never at the [CLS] that ends a window: a document's first token has no place before it."""
    dataset, first, seen = dataset_of(source, shifted=True, counted="all"), 0, 0
    for n, layout in enumerate(dataset.layouts(np.arange(60))):
        whole = super(DocumentDataset, dataset).example(n, layout)
        first += 0 in whole.labels[WORDS][0]
        for number in range(int(dataset.counts(layout[None])[0])):
            layout["window"] = number
            window = dataset.example(n, layout)
            at, words = window.labels[WORDS]
            assert (window.source_offsets[at] >= 0).all()
            known = window.source_offsets[at + 1] >= 0  # the others stand in the next window
            np.testing.assert_array_equal(window.unmasked_ids[at + 1][known], words[known])
            seen += known.sum()
    assert first and seen


def test_slots_take_the_next_document_in_order(source: CorpusSource) -> None:
    stream = stream_of(source)
    counts = stream.datasets[0].counts(stream.datasets[0].layouts(np.arange(200)))
    following, slots = 0, [[0, 0] for _ in range(ROWS)]  # document, windows that are left
    for step in range(70):
        if step == 40:  # a stage begins with new documents
            slots = [[0, 0] for _ in range(ROWS)]
        for slot in slots:
            if not slot[1]:
                slot[0], slot[1] = following, int(counts[following])
                following += 1
        rows = stream.step_rows(step)
        assert [row[0].number for row in rows] == [slot[0] for slot in slots]
        left = [int(counts[row[0].number] - row[0].layout["window"]) for row in rows]
        assert left == [slot[1] for slot in slots]
        for slot in slots:
            slot[1] -= 1
        assert stream.consumed(step + 1) == {GROUP: following}
    assert following > 2 * ROWS


def test_seeking_equals_reading(source: CorpusSource) -> None:
    """Backwards, from a stored state, and for any number of processes."""
    stream = stream_of(source)
    whole = [stream.batches(step, 0, 1, ROWS)[0] for step in range(70)]
    for step in (69, 3, 41, 17):
        again = stream_of(source)
        again.load_state_dict(json.loads(json.dumps(stream.state_dict(step))))
        for reader in (stream, again):
            parts = [reader.batches(step, rank, ROWS, 1)[0] for rank in range(ROWS)]
            for name in ("input_ids", "sequence_ids", "documents"):
                joined = torch.cat([getattr(part, name) for part in parts])
                assert torch.equal(joined, getattr(whole[step], name))
            assert [part.first_row for part in parts] == [0, 1, 2]
        assert again.consumed(step) == stream.consumed(step)
    assert stream.state_dict(70) == {}
    padding = whole[0].input_ids == source.vocabulary.pad
    assert torch.equal(padding, whole[0].sequence_ids < 0)


@pytest.mark.parametrize(("remembers", "distinct"), [("slot", 1), ("nothing", 40)])
def test_memories_last_as_the_recipe_says(
    source: CorpusSource, remembers: str, distinct: int
) -> None:
    stream = stream_of(source, remembers=remembers)
    batches = [stream.batches(step, 0, 1, ROWS)[0] for step in range(40)]
    numbers = {int(batch.documents[0]) for batch in batches if batch.documents is not None}
    assert len(numbers) == distinct


@pytest.mark.parametrize(("world", "micro_rows"), [(1, 1), (2, 2)])
def test_held_out_documents_are_read_to_their_end(
    source: CorpusSource, world: int, micro_rows: int
) -> None:
    dataset = dataset_of(source, fixed=True)
    held_out = held_out_documents([dataset], 5, LENGTH, source.vocabulary.pad, (1, 1, 1))
    found: Counter[tuple[int, int]] = Counter()
    batches = 0
    for rank in range(world):
        steps = 0
        for built, batch in held_out.batches(rank, world, micro_rows):
            assert batch.memory is not None and len(batch.input_ids) == micro_rows
            batch.memory.following = batch.memory.past
            found.update((x.ref.number, int(x.ref.layout["window"])) for row in built for x in row)
            steps += 1
        assert steps == batches or not batches
        batches = steps
    counts = dataset.counts(dataset.layouts(np.arange(5)))
    assert found == Counter((n, window) for n in range(5) for window in range(counts[n]))


@pytest.mark.parametrize("remembers", ["document", "slot", "nothing"])
def test_a_held_out_document_does_not_remember_one_of_another_task_group(
    source: CorpusSource, remembers: str
) -> None:
    """Of the same number, read before it in its slot: scores depended on the number of slots."""
    datasets = [dataset_of(source, fixed=True, remembers=remembers) for _ in range(2)]
    held_out = held_out_documents(datasets, 1, LENGTH, source.vocabulary.pad, (1, 1, 1))
    remembered: dict[int, list[float]] = {0: [], 1: []}
    for built, batch in held_out.batches(0, 1, 1):
        assert batch.memory is not None and batch.memory.past is not None
        batch.memory.following = batch.memory.past + 1
        remembered[built[0][0].ref.dataset].append(float(batch.memory.past))
    assert remembered[0] == remembered[1] and len(remembered[0]) > 1
    assert remembered[0][:2] == ([0.0, 0.0] if remembers == "nothing" else [0.0, 1.0])


def test_it_says_how_many_tokens_are_fresh(source: CorpusSource) -> None:
    text = dataset_of(source).describe()
    assert "every 12, read twice" in text and "fresh tokens a row" in text
    once = dataset_of(source, readings=1, stride=30)
    assert float(once.mean_tokens) * 2 < float(dataset_of(source).mean_tokens)
