"""Tasks on whole texts that may have an image beside them: what heads read, restated in numpy, rows
of several choices, encoder passes, and inputs that do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.task_group_dataset import collate_built
from palm_ds.data.tasks.task import build
from tests.helpers.small_images import BOTH, BOXES, PICTURE, UNIMO, asked_rows
from tests.helpers.text_tables import built_of, dataset_of, learned, model_of, source_of

LABELS = {
    "multi_label": "worth",
    "classification": "label",
    "regression": "grade",
    "ranking": "grade",
    "multiple_choice": "right",
}


def source_for(kind: str, folder: Path, rows: int = 6, seed: int = 1) -> TableSource:
    made = [{**row, "target": ""} for row in asked_rows(rows, seed)]
    return source_of(folder, made, columns={**PICTURE, "label": LABELS[kind]})


def task_of(kind: str, source: TableSource, **values: Any) -> Any:
    given = {"kind": kind, "source": "s", "images": True, "dropout": 0.0, **values}
    return build("seen", given).resolved(source)


def loss_of(kind: str, logits: np.ndarray, targets: np.ndarray) -> float:
    if kind == "multi_label":
        return (np.logaddexp(0, logits) - targets * logits).mean(1).sum()
    if kind == "regression":
        return ((logits[:, 0] - targets) ** 2).sum()
    if kind == "multiple_choice":
        logits, targets = logits.reshape(-1, 2), targets.reshape(-1, 2).argmax(1)
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return -log[np.arange(len(log)), targets].sum()


@BOTH
@pytest.mark.parametrize("kind", LABELS)
def test_heads_read_the_product_of_both_poolers(
    kind: str, encoder: dict[str, Any], tmp_path: Path
) -> None:
    source = source_for(kind, tmp_path)
    task = task_of(kind, source)
    model = model_of(task, **encoder)
    _, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        output, vectors = model(batch, ("seen",))["seen"], model.backbone(batch).flatten(0, 1)
    weights = {name: x.detach().double().numpy() for name, x in model.named_parameters()}
    at, targets = (x.numpy() for x in batch.labels["seen"])
    if kind == "multi_label":
        assert {1.0, 0.3} <= {round(float(x), 3) for x in targets.ravel()}
    ends = batch.cu_seqlens.numpy()
    after = ends[np.searchsorted(ends, at, side="right")]

    def pooled(pooler: str, places: np.ndarray) -> np.ndarray:
        weight, bias = (weights[f"backbone.{pooler}.dense.{x}"] for x in ("weight", "bias"))
        rows = vectors[places].double().numpy()[:, : weight.shape[1]]
        return np.maximum(rows @ weight.T + bias, 0)

    both = pooled("pooler", at) * pooled("region_pooler", after - BOXES - 1)
    logits = both @ weights["heads.seen.out.weight"].T + weights["heads.seen.out.bias"]
    assert output.scores is not None and np.allclose(output.scores, logits, atol=1e-5)
    assert float(output.loss_sum) == pytest.approx(loss_of(kind, logits, targets), rel=1e-5)


def test_each_choice_has_the_image_beside_it(tmp_path: Path) -> None:
    source = source_for("multiple_choice", tmp_path, rows=3)
    task = task_of("multiple_choice", source)
    dataset = dataset_of(source, task)
    built, _ = built_of(dataset)
    (part,) = (x for row in built for x in row if x.example.item == 1)
    example, found = part.example, task.regions_of(1, source)
    assert example.regions is not None and len(example.regions) == 2 * (BOXES + 1)
    assert np.array_equal(example.regions.features, np.tile(found.features, (2, 1)))
    ends = np.cumsum(example.sub_lengths)
    assert example.regions.firsts.tolist() == (ends - BOXES - 1).tolist()
    assert example.position_ids is not None
    assert example.position_ids[ends[0]] == 0 and example.position_ids[ends[0] - 1] == 0
    lengths = dataset.layouts(np.arange(3))["length"]
    assert lengths[1] == len(example) == 2 * (5 + 4 + BOXES + 1)
    encoder = model_of(task, **UNIMO).backbone
    with torch.no_grad():  # choices do not see each other's image
        whole = encoder(collate_built([dataset], [[part]], len(example), 0))[0]
        example.regions.features[BOXES + 1 :] += 1
        changed = encoder(collate_built([dataset], [[part]], len(example), 0))[0]
    assert torch.equal(whole[: ends[0]], changed[: ends[0]])
    assert not torch.allclose(whole[ends[0] :], changed[ends[0] :])


def test_rows_that_are_too_short_for_the_images_of_choices(tmp_path: Path) -> None:
    source = source_for("multiple_choice", tmp_path, rows=3)
    task = task_of("multiple_choice", source)
    assert dataset_of(source, task, max_length=24).layouts(np.arange(3))["length"].max() == 24
    with pytest.raises(UserError, match="2 choices leave fewer than 8 tokens .*raise `length`"):
        dataset_of(source, task, max_length=20).layouts(np.arange(3))


def test_an_encoder_pass_is_shared_by_tasks_that_read_the_same(tmp_path: Path) -> None:
    source = source_for("classification", tmp_path)
    several = [
        [task_of(kind, source, images=images).input_key() for images in (False, True)]
        for kind in ("classification", "multi_label")
    ]
    assert several[0] == several[1] and several[0][0] != several[0][1]
    fewer = task_of("classification", source, max_regions=2).input_key()
    assert fewer not in several[0]


def test_in_a_group_the_first_task_reads_the_image(tmp_path: Path) -> None:
    source = source_for("classification", tmp_path)
    seen = task_of("classification", source)
    first = build("first", {"kind": "masked_regions", "source": "s"}).resolved(source)
    _, batch = built_of(dataset_of(source, first, seen))
    assert batch.count("seen") == 6
    text = build("text", {"kind": "masked_words", "source": "s", "texts": ["text_a"]})
    with pytest.raises(
        UserError, match="tasks.seen: reads images, but the first task of its group"
    ):
        built_of(dataset_of(source, text, seen))
    other = build("other", {"kind": "classification", "source": "s"}).resolved(source)
    with pytest.raises(UserError, match="seen.images: true, but the head is that of tasks.other"):
        seen.with_head_of(other)
    with pytest.raises(UserError, match="backbone.kind: bert reads texts alone"):
        model_of(seen)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in LABELS if kind != "regression"])
@BOTH
def test_they_are_learned(kind: str, encoder: dict[str, Any], tmp_path: Path) -> None:
    """Held-out losses beat those of frequencies by five standard errors of the difference."""
    source = source_for(kind, tmp_path, rows=240)
    task = task_of(kind, source)
    model = learned(source, task, steps=60, lr=4e-3, **encoder)
    held = source_for(kind, tmp_path, rows=200, seed=2)
    _, batch = built_of(dataset_of(held, task))
    with torch.no_grad():
        output = model(batch, ("seen",))["seen"]
    targets = batch.labels["seen"][1].numpy()
    right = float(output.correct) / 200
    chance = float(np.mean(task.baseline(targets, held)[1]))
    assert right - chance > 5 * np.sqrt(right * (1 - right) / 200)
