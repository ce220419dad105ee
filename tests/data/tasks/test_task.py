"""User-defined tasks in a separate module, without changes to the package."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource, passages, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.tasks.task import build, find, known_kinds
from tests.helpers.small_corpus import write_small_corpus


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    corpus = write_small_corpus(tmp_path_factory.mktemp("c") / "corpus")
    return split_corpus(corpus, 0.0, ("word",))[0]


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    (tmp_path / "my_tasks.py").write_text(
        textwrap.dedent(
            '''
            """Is this the first token of a word?"""
            from dataclasses import dataclass
            import numpy as np
            from palm_ds.model.heads.heads import ClassHead
            from palm_ds.data.tasks.task import CorpusTask, Task

            @dataclass(frozen=True, kw_only=True)
            class WordStarts(CorpusTask):
                every: int = 1
                def annotations(self):
                    return ("word",)
                def label(self, example, source, rng):
                    at = np.flatnonzero(example.source_offsets >= 0)[:: self.every]
                    example.labels[self.name] = at, example.annotations["word"][at]
                def head(self, backbone):
                    return ClassHead(backbone.config.hidden_size, classes=2)

            @dataclass(frozen=True, kw_only=True)
            class Liar(WordStarts):
                def example(self, layout, source, rng):
                    layout = layout.copy()
                    layout["length"] -= 1
                    return super().example(layout, source, rng)

            @dataclass(frozen=True, kw_only=True)
            class TooLong(WordStarts):
                def layout(self, items, uniform, source, room):
                    layout = super().layout(items, uniform, source, room)
                    layout["length"] = room + 1
                    return layout

            class Unfinished(Task):
                def head(self, backbone):
                    return ClassHead(backbone.config.hidden_size, classes=2)
            '''
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_tasks", None)


def dataset_of(source, kind, **values) -> TaskGroupDataset:
    task = build("starts", {"kind": kind, "source": "text", **values})
    return TaskGroupDataset(
        name="starts", tasks=(task,), task_id=0, source=source, seed=1, max_length=32
    )


def test_a_task_from_a_user_module(my_module, source):
    dataset = dataset_of(source, "my_tasks.WordStarts", every=2)
    (layout,) = dataset.layouts(np.array([3]))
    example = dataset.example(3, layout)
    at, targets = example.labels["starts"]
    assert at.tolist() == list(range(1, len(example) - 1, 2))
    assert targets.tolist() == example.annotations["word"][at].tolist()


def test_a_task_whose_example_is_shorter_than_its_layout(my_module, source):
    dataset = dataset_of(source, "my_tasks.Liar")
    (layout,) = dataset.layouts(np.array([3]))
    with pytest.raises(UserError, match=r"tasks.starts: example\(\) returned \d+ tokens"):
        dataset.example(3, layout)


def test_a_task_that_is_too_long_for_a_row(my_module, source):
    with pytest.raises(UserError, match="33 tokens; rows have 32"):
        dataset_of(source, "my_tasks.TooLong").layouts(np.arange(3))


def test_a_task_without_a_source_is_refused():
    with pytest.raises(
        UserError, match=r"^tasks.mask.source: missing; name the entry of `sources`"
    ):
        build("mask", {"kind": "knowledge_masking"})


def test_a_missing_class_is_refused(my_module):
    with pytest.raises(UserError, match="my_tasks has no .Absent"):
        find("my_tasks.Absent")


def test_known_kinds_are_files_of_the_package():
    known = known_kinds()
    assert {"knowledge_masking", "sentence_reordering", "sentence_distance"} <= set(known)
    for kind in known:
        assert find(kind).__name__.lower() == kind.replace("_", "")


def test_passages_cover_every_document_once(source):
    table = passages(source, 30)
    covered = np.concatenate([np.arange(a, b) for a, b, _ in table])
    assert np.array_equal(covered, np.arange(source.corpus.manifest.tokens))
    assert (table[:, 1] - table[:, 0] <= 30).all()
    starts = set(source.corpus.document_starts.tolist())
    for a, b, document in table:
        assert not starts & set(range(a + 1, b))
        assert document in starts


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (("capital", "word"), "add it with: palm-ds corpus annotate .* --annotation capital$"),
        (("capital", "role"), "only the input gives role: .* palm-ds prepare --format dialogues$"),
        (("number",), "--annotation number=MODULE:FUNCTION$"),
    ],
)
def test_a_missing_annotation_is_named_with_what_gives_it(source, names, hint):
    with pytest.raises(UserError, match=f"has no annotation {names[0]}.*; .*{hint}"):
        split_corpus(source.corpus, 0.1, names)


def test_a_class_without_the_methods_of_a_task_is_refused(my_module):
    with pytest.raises(UserError, match="lacks example, items, layout; derive it from palm.Corpus"):
        find("my_tasks.Unfinished")
