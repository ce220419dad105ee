"""Word and pair tasks on real English: rows stay full, examples keep their promises."""

from __future__ import annotations

import numpy as np
import pytest

from palm_ds.corpus.store import Corpus
from palm_ds.data.sources.corpus import split_corpus
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.data.stream.packed_stream import PackedStream
from palm_ds.data.stream.stages import StepSize, tasks_of
from palm_ds.data.stream.task_group_dataset import make_datasets
from palm_ds.data.tasks.task import build

pytestmark = pytest.mark.slow

BLENDS = [
    "capitalization",
    "token_document_relation",
    "next_sentence_prediction",
    "sentence_order",
    "knowledge_masking + capitalization + token_document_relation",
    "next_sentence_prediction + knowledge_masking + capitalization",
]
KINDS = sorted({kind for task_group in BLENDS for kind in tasks_of(task_group)})
MARKS = ("capital", "word", "phrase", "entity")


def make_stream(corpus: Corpus, task_groups: list[str], length: int) -> PackedStream:
    tasks = {kind: build(kind, {"source": "text"}) for kind in KINDS}
    curriculum = read_stages({"continual": task_groups, "steps": 12}, KINDS)
    sources = {"text": [("corpus", split_corpus(corpus, 0.1, MARKS)[0], 1.0)]}
    numbers = {kind: n for n, kind in enumerate(KINDS)}
    datasets, mixtures = make_datasets(
        curriculum.task_groups, tasks, numbers, sources, seed=1, length=length
    )
    return PackedStream(
        curriculum=curriculum,
        datasets=datasets,
        mixtures=[mixtures] * len(curriculum.stages),
        sizes=[StepSize(length, 16384 // length)] * len(curriculum.stages),
        seed=1,
        pad=corpus.vocabulary.pad,
        window_rows=512,
    )


@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize("task_groups", [[0], [1], [2], [3], [0, 1, 2, 3, 4, 5]])
def test_rows_are_full(shared_en, length, task_groups):
    stream = make_stream(shared_en, [BLENDS[b] for b in task_groups], length)
    used = [
        sum(int(layout["length"]) for *_, layout in row)
        for step in range(stream.curriculum.steps)
        for row in stream.step_rows(step)
    ]
    assert np.mean(used) / length >= 0.985


def test_every_task_of_a_blend_labels_every_text(shared_en):
    stream = make_stream(shared_en, BLENDS, 128)
    shares: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    for dataset in stream.datasets:
        for n, layout in enumerate(dataset.layouts(np.arange(100))):
            example = dataset.example(n, layout)
            assert set(example.labels) == {task.name for task in dataset.tasks}
            for name, (at, targets) in example.labels.items():
                assert len(at) == len(targets) == len(set(at.tolist()))
                assert name != "token_document_relation" or (example.source_offsets[at] >= 0).all()
                shares[name].append(np.asarray(targets))
    share = {name: np.concatenate(each).mean() for name, each in shares.items()}
    assert 0.08 < share["capitalization"] < 0.25
    assert 0.4 < share["token_document_relation"] < 0.75
    assert 0.4 < share["next_sentence_prediction"] < 0.6
    assert 0.35 < share["sentence_order"] < 0.65
