"""Scene graphs: which nodes are masked, where their tokens are, and that images help."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.tasks.scene_graph_prediction import SceneGraphPrediction
from tests.helpers.small_images import BOTH, COLUMNS, image_rows
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    learned,
    make_task,
    small_tokenizer,
    source_of,
)

TEXT = "so goods bad a very b"  # so (of goods); bad (of goods and a); very (of b)
GRAPH = {
    "objects": [[3, 8], [13, 14], [20, 21]],
    "attributes": [[0, 2, 0], [15, 19, 2]],
    "relations": [[9, 12, 0, 1]],
}


def task_of(source: Any, **values: Any) -> SceneGraphPrediction:
    return make_task(SceneGraphPrediction, "scene", max_tags=0, **values).resolved(source)


def test_nodes_are_masked_with_what_they_are_about_left_in(tmp_path: Path) -> None:
    rows = [{**row, "text_a": TEXT, "graph": GRAPH} for row in image_rows(60)]
    source = source_of(tmp_path, rows, columns=COLUMNS)
    built, _ = built_of(dataset_of(source, task_of(source, mask_rate=1.0, random_rate=0.0)))
    seen = set()
    for example in (part.example for row in built for part in row):
        where, targets = example.labels["scene"]
        assert (example.unmasked_ids[where] == targets).all()
        assert small_tokenizer().tokens(example.input_ids[where]) == ["[MASK]"] * len(where)
        seen.add(" ".join(small_tokenizer().tokens(targets)))
    # The relation is the only one of its kind, and keeps goods and a; the attribute of b keeps b.
    assert seen == {"so bad b", "bad very"}


def test_the_share_of_nodes(tmp_path: Path) -> None:
    letters = " ".join("abcdefghij")
    graph = {"objects": [[2 * number, 2 * number + 1] for number in range(10)]}
    rows = [{**row, "text_a": letters, "graph": graph} for row in image_rows(100)]
    source = source_of(tmp_path, rows, columns=COLUMNS)
    _, batch = built_of(dataset_of(source, task_of(source)))
    assert batch.count("scene") == 300
    assert len(set(batch.labels["scene"][1].tolist())) == 10


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (None, "scene_graph: expected {objects"),
        ({"things": []}, "scene_graph: expected {objects"),
        ({"objects": [[0, 2, 0]]}, "objects: [0, 2, 0]: expected 2 whole numbers"),
        ({"objects": [3]}, "objects: 3: expected 2 whole numbers"),
        ({"relations": 5}, "relations: 5: expected 4 whole numbers"),
        ({"objects": [[0, 99]]}, "objects: characters 0 to 99 of a text of 21"),
        ({"attributes": [[0, 2, 0]]}, "attributes: object 0 of 0, counted from 0"),
    ],
)
def test_mistakes_name_the_row(tmp_path: Path, graph: Any, message: str) -> None:
    rows = [{**image_rows(1)[0], "text_a": TEXT, "graph": graph}]
    source = source_of(tmp_path, rows, columns=COLUMNS)
    with pytest.raises(UserError) as error:
        task_of(source).check(source, labeled=True)
    assert message in str(error.value) and "rows0.jsonl:1" in str(error.value)


@pytest.mark.slow
@BOTH
def test_objects_are_read_off_the_image(encoder: dict[str, Any], tmp_path: Path) -> None:
    """Held-out losses beat the frequencies of words by five standard errors, and a guess among the
    letters that the text does not name."""
    train = source_of(tmp_path, image_rows(200), columns=COLUMNS)
    task = task_of(train)
    model = learned(train, task, steps=90, lr=4e-3, **encoder)
    held = source_of(tmp_path, image_rows(200, seed=2), columns=COLUMNS)
    _, batch = built_of(dataset_of(held, task))
    with torch.no_grad():
        scores = model(batch, ("scene",))["scene"].scores
    targets = batch.labels["scene"][1].numpy()
    log = scores.log_softmax(-1).numpy()[np.arange(len(targets)), targets]
    of_letters = targets != small_tokenizer().backend.token_to_id("so")
    for base in (task.baseline(targets, held)[0], np.full(len(targets), math.log(4))):
        gain = (base + log)[of_letters]
        assert gain.mean() > 5 * gain.std() / math.sqrt(len(gain))
