"""Sentence tasks with a tokenizer like RoBERTa's, which puts two separators between texts: layouts
stay exact and within a row."""

from __future__ import annotations

import numpy as np
import pytest

from palm_ds.data.corpus_source import CorpusSource, split_corpus
from palm_ds.data.task import CorpusTask
from palm_ds.data.task_group_dataset import ExampleRef, TaskGroupDataset, extend_into_padding
from palm_ds.pretrain.next_sentence_prediction import NextSentencePrediction
from palm_ds.pretrain.sentence_distance import SentenceDistance
from palm_ds.pretrain.sentence_order import SentenceOrder
from palm_ds.pretrain.sentence_reordering import SentenceReordering
from tests.helpers.small_corpus import write_small_corpus

LENGTH, CLS, SEP = 64, 2, 3
KINDS: list[type[CorpusTask]] = [
    NextSentencePrediction,
    SentenceDistance,
    SentenceOrder,
    SentenceReordering,
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(write_small_corpus(folder, documents=60, separators=2), 0.0, ())[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longer", [False, True])
def test_layouts_are_exact(kind: type[CorpusTask], longer: bool, source: CorpusSource) -> None:
    task = kind(name="task", source="text")
    dataset = TaskGroupDataset(
        name="task", tasks=(task,), task_id=0, source=source, seed=5, max_length=LENGTH
    )
    longest = 0
    for n, layout in enumerate(dataset.layouts(np.arange(300))):
        if longer:
            ((_, _, layout),) = extend_into_padding([ExampleRef(0, n, layout)], LENGTH)
        example = dataset.example(n, layout)
        assert len(example) == layout["length"] <= LENGTH
        ids, types = example.input_ids, example.token_type_ids
        texts = types.max() + 1
        special = np.where(ids == CLS, "(", np.where(ids == SEP, ")", "."))
        joined = "".join(special[example.source_offsets < 0])
        assert joined == "(" + "))" * (texts - 1) + ")"
        assert (np.diff(types) == 1).sum() == texts - 1  # each text has a segment, as ever
        longest = max(longest, len(example))
    assert longest == LENGTH or not longer
