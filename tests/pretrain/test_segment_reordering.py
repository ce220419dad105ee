"""Documents in another order: every permutation is one class."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.stream.windows import LONGEST
from palm_ds.model.encoder.encoder import memory_shape
from palm_ds.pretrain.segment_reordering import SegmentReordering
from palm_ds.train.recipe.recipe import make_recipe
from tests.helpers.small_corpus import write_small_corpus

TASK = SegmentReordering(name="segment_reordering", source="text")


def test_every_permutation_of_up_to_four_segments_is_one_class() -> None:
    every = [order for n in (1, 2, 3, 4) for order in permutations(range(n))]
    assert len(TASK.orders) == 33 and sorted(TASK.orders) == sorted(every)
    assert TASK.class_name(2) == "2 1"


def test_a_label_says_how_the_document_is_shuffled(tmp_path) -> None:
    """Put in order by its label, the document is as it was; all classes are alike."""
    source = split_corpus(write_small_corpus(tmp_path / "c", documents=30), 0.0, ("word",))[0]
    dataset = TaskGroupDataset("g", (TASK,), 0, source, 1, LONGEST)
    seen = []
    for n, layout in enumerate(dataset.layouts(np.arange(300))):
        example = dataset.example(n, layout)
        (where,), (label,) = example.labels[TASK.name]
        order = TASK.orders[label]
        offsets = example.source_offsets[1:-1]
        pieces = np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1)
        # Neighbors that stay neighbors are one piece.
        joined = 1 + sum(b != a + 1 for a, b in zip(order, order[1:], strict=False))
        assert where == 0 and len(pieces) == joined
        first = [order[0]] + [b for a, b in zip(order, order[1:], strict=False) if b != a + 1]
        restored = np.concatenate([pieces[i] for i in np.argsort(first)])
        np.testing.assert_array_equal(restored, np.arange(restored[0], restored[-1] + 1))
        assert restored[0] in source.starts and restored[-1] + 1 in source.ends
        piece = source.read(restored[0], restored[-1] + 1)
        ids = dict(zip(restored.tolist(), piece.ids.tolist(), strict=True))
        assert example.input_ids[1:-1].tolist() == [ids[x] for x in offsets.tolist()]
        seen.append(int(label))
    assert np.bincount(seen, minlength=33).min() > 0
    loss, right = TASK.baseline(np.array([0, 5]), source)
    assert np.allclose(loss, np.log(33)) and np.allclose(right, 1 / 33)


RECIPE = {
    "backbone": {"preset": "doc-tiny"},
    "length": 128,
    "batch": "4 rows",
    "sources": {"text": {"corpus": "c"}},
    "tasks": {TASK.name: {"source": "text"}},
    "stages": [{TASK.name: 10}],
}
WRONG = [
    ({"backbone": {"preset": "tiny"}}, "for which backbone.kind: bert has no memories"),
    ({"batch": "4 examples"}, "batch: 4 examples, but each row .* write `4 rows`"),
    ({"optimizer": {"fgm": 1.0}}, "optimizer.fgm: is for texts in packed rows"),
    ({"teacher": {"path": "t"}}, "teacher: is for texts in packed rows"),
    ({"sources": {"text": {"mix": {"c": 1, "d": 2}}}}, "reads a `mix` of corpora"),
    (
        {
            "tasks": {
                "sentence_distance": {"source": "text"},
            },
            "stages": [{"sentence_distance": 1}],
        },
        "tasks.sentence_distance: reads texts in packed rows",
    ),
    (
        {
            "tasks": {TASK.name: {"source": "text"}, "knowledge_masking": {"source": "text"}},
            "stages": [{TASK.name: 1, "knowledge_masking": 1}],
        },
        r"stages.0: .* join tasks with \+",
    ),
    (
        {
            "backbone": {"preset": "tiny"},
            "documents": {"readings": 1},
            "tasks": {"knowledge_masking": {"source": "text"}},
            "stages": [{"knowledge_masking": 1}],
        },
        "documents: bert has no memories",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_recipe({**RECIPE, **change})


def test_the_recipe_itself_is_right() -> None:
    recipe = make_recipe(RECIPE)
    assert recipe.documents_read is not None and memory_shape(recipe.backbone_config) == (
        2,
        64,
        128,
    )
