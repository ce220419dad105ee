"""Texts with images: their places, packed rows, and what an encoder of texts says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.stream.task_group_dataset import collate_built
from palm_ds.tasks.masked_regions import MaskedRegions
from palm_ds.tasks.shared.image_text import overlaps
from tests.helpers.small_images import BOXES, COLUMNS, FEATURES, UNIMO, image_rows
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    make_task,
    model_of,
    small_tokenizer,
    source_of,
)


def test_a_text_its_tags_and_the_whole_image_before_its_regions(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(4), columns=COLUMNS)
    task = make_task(MaskedRegions, "regions", mask_rate=0.0).resolved(source)
    built, batch = built_of(dataset_of(source, task))
    example = next(x.example for row in built for x in row if x.example.item == 2)
    tokens = small_tokenizer().tokens(example.unmasked_ids)
    text = source.column("text_a")[2]
    assert tokens[:8] == ["[CLS]", *text.split(), "[SEP]"]
    assert tokens[8:11] == source.column("object_tags")[2].split()
    assert example.position_ids is not None and example.regions is not None
    assert example.position_ids.tolist() == [*range(8), 0, 1, 2, 0, 0, 0, 0]
    assert (example.source_offsets[8:] == -1).all()
    found, (whole, *others) = source.regions(2), example.regions.features
    assert np.array_equal(others, found.features) and np.allclose(whole, found.features.mean(0))
    assert example.regions.locations[0].tolist() == [0, 0, 1, 1, 1]
    regions = batch.regions
    assert regions is not None and len(regions.positions) == 4 * (BOXES + 1)
    assert regions.firsts.tolist() == regions.positions[:: BOXES + 1].tolist()
    short = make_task(MaskedRegions, "regions", max_regions=2, max_tags=1).resolved(source)
    assert dataset_of(source, short).layouts(np.arange(4))["length"].tolist() == [8 + 1 + 2] * 4


def test_the_same_vectors_in_packed_rows_and_alone(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(5), columns=COLUMNS)
    task = make_task(MaskedRegions, "regions").resolved(source)
    dataset = dataset_of(source, task)
    encoder = model_of(task, **UNIMO).backbone
    built, batch = built_of(dataset)
    assert len(built) < 5  # several texts in a row
    with torch.no_grad():
        together = encoder(batch).flatten(0, 1)
        for number, row in enumerate(built):
            at = number * dataset.max_length
            for part in row:
                alone = encoder(collate_built([dataset], [[part]], len(part.example), 0))[0]
                assert torch.allclose(together[at : at + len(alone)], alone, atol=1e-5)
                at += len(alone)


def test_a_batch_without_images_gives_gradients_of_zero(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(3), columns=COLUMNS)
    task = make_task(MaskedRegions, "regions").resolved(source)
    model = model_of(task, **UNIMO)
    _, batch = built_of(dataset_of(source, task))
    outputs = model.train()(batch.padding_row())
    torch.stack([output.loss_sum for output in outputs.values()]).sum().backward()
    lost = [name for name, x in model.named_parameters() if x.grad is None]
    assert lost == []
    assert all((x.grad == 0).all() for x in model.parameters() if x.grad is not None)


def test_an_encoder_that_reads_no_images_says_so(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(2), columns=COLUMNS)
    task = make_task(MaskedRegions, "regions").resolved(source)
    with pytest.raises(UserError, match="reads images, but backbone.kind: bert reads texts alone"):
        model_of(task)
    with pytest.raises(UserError, match="region_size: 7, but the regions of tasks.regions have 12"):
        model_of(task, **{**UNIMO, "options": {"region_size": 7}})
    plain = source_of(tmp_path, [{"text_a": "so good"}])
    with pytest.raises(UserError, match=r"no column 'image'.*map one with `columns: {image: NAME}"):
        task.check(plain, labelled=True)


def test_images_that_do_not_fit(tmp_path: Path) -> None:
    rows = image_rows(2)
    rows[1]["pic"]["features"] = [x[:5] for x in rows[1]["pic"]["features"]]
    source = source_of(tmp_path, rows, columns=COLUMNS)
    task = make_task(MaskedRegions, "regions").resolved(source)
    with pytest.raises(UserError, match=f"5 features for each region; the others have {FEATURES}"):
        built_of(dataset_of(source, task))
    with pytest.raises(UserError, match="4 regions and 3 tokens of tags leave no room for a text"):
        dataset_of(source, task, max_length=9).layouts(np.arange(2))


def test_overlaps_are_intersection_over_union() -> None:
    boxes = np.array([[0, 0, 0.5, 0.5], [0.25, 0, 0.75, 0.5], [0.9, 0.9, 1, 1]])
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1, keepdims=True)
    places = np.hstack([boxes, area])
    found = overlaps(places, places[:1])
    assert found == pytest.approx([1, 1 / 3, 0])
    assert overlaps(places, places[:0]).tolist() == [0, 0, 0]
