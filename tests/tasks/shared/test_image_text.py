"""Texts with images: their places, packed rows, and what an encoder of texts says. Tasks on whole
texts that may have an image: what heads read, restated in numpy, and rows of several choices."""

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
from palm_ds.model.heads.pooled import MultiLabelHead
from palm_ds.tasks.masked_regions import MaskedRegions
from palm_ds.tasks.shared.image_text import overlaps
from tests.helpers.small_images import (
    BOTH,
    BOXES,
    COLUMNS,
    FEATURES,
    PICTURE,
    UNIMO,
    asked_rows,
    image_rows,
)
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    learned,
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
        task.check(plain, labeled=True)


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


# Whole texts beside an image ------------------------------------------------------------------

LABELS = {
    "multi_label": "worth",
    "classification": "label",
    "regression": "grade",
    "ranking": "grade",
    "multiple_choice": "right",
}


def asked_source(kind: str, folder: Path, rows: int = 6, seed: int = 1) -> TableSource:
    made = [{**row, "target": ""} for row in asked_rows(rows, seed)]
    return source_of(folder, made, columns={**PICTURE, "label": LABELS[kind]})


def whole_task(kind: str, source: TableSource, **values: Any) -> Any:
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
    source = asked_source(kind, tmp_path)
    task = whole_task(kind, source)
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
    source = asked_source("multiple_choice", tmp_path, rows=3)
    task = whole_task("multiple_choice", source)
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
    source = asked_source("multiple_choice", tmp_path, rows=3)
    task = whole_task("multiple_choice", source)
    assert dataset_of(source, task, max_length=24).layouts(np.arange(3))["length"].max() == 24
    with pytest.raises(UserError, match="2 choices leave fewer than 8 tokens .*raise `length`"):
        dataset_of(source, task, max_length=20).layouts(np.arange(3))


def test_an_encoder_pass_is_shared_by_tasks_that_read_the_same(tmp_path: Path) -> None:
    source = asked_source("classification", tmp_path)
    several = [
        [whole_task(kind, source, images=images).input_key() for images in (False, True)]
        for kind in ("classification", "multi_label")
    ]
    assert several[0] == several[1] and several[0][0] != several[0][1]
    fewer = whole_task("classification", source, max_regions=2).input_key()
    assert fewer not in several[0]


def test_in_a_group_the_first_task_reads_the_image(tmp_path: Path) -> None:
    source = asked_source("classification", tmp_path)
    seen = whole_task("classification", source)
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
    source = asked_source(kind, tmp_path, rows=240)
    task = whole_task(kind, source)
    model = learned(source, task, steps=60, lr=4e-3, **encoder)
    held = asked_source(kind, tmp_path, rows=200, seed=2)
    _, batch = built_of(dataset_of(held, task))
    with torch.no_grad():
        output = model(batch, ("seen",))["seen"]
    targets = batch.labels["seen"][1].numpy()
    right = float(output.correct) / 200
    chance = float(np.mean(task.baseline(targets, held)[1]))
    assert right - chance > 5 * np.sqrt(right * (1 - right) / 200)


def test_a_head_of_questions_has_a_hidden_layer(tmp_path: Path) -> None:
    """ERNIE-ViL's: linear map, ReLU, dropout, linear map; the losses of the classes are added."""
    source = asked_source("multi_label", tmp_path)
    task = whole_task("multi_label", source, hidden_layer=40, reduction="sum", dropout=0.5)
    model = model_of(task, **UNIMO)
    _, batch = built_of(dataset_of(source, task))
    at, targets = batch.labels["seen"]
    ends = batch.cu_seqlens
    after = ends[torch.searchsorted(ends, at.int(), right=True)] - BOXES - 1
    with torch.no_grad():
        output, vectors = model(batch, ("seen",))["seen"], model.backbone(batch).flatten(0, 1)
        both = model.backbone.match(torch.cat([vectors[after], vectors[at]])).double().numpy()
    weights = {
        name: x.detach().double().numpy() for name, x in model.heads["seen"].named_parameters()
    }
    inside = np.maximum(both @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    logits = inside @ weights["out.weight"].T + weights["out.bias"]
    assert output.scores is not None and np.allclose(output.scores, logits, atol=1e-5)
    wanted = targets.double().numpy()
    each = np.logaddexp(0, logits) - wanted * logits
    assert float(output.loss_sum) == pytest.approx(each.sum(), rel=1e-5)
    assert np.allclose(model.logits(batch, "seen").detach(), logits, atol=1e-5)
    base = whole_task("multi_label", source).baseline(wanted, source)[0]
    assert np.allclose(task.baseline(wanted, source)[0], base * wanted.shape[1])
    seen: list[torch.Tensor] = []
    head: Any = model.heads["seen"]
    head.out.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.train()(batch)
    kept = seen[0].detach().numpy() != 0
    assert np.allclose(seen[0].detach().numpy()[kept], 2 * inside[kept], atol=1e-5)
    assert 0.3 < kept[inside > 0].mean() < 0.7


def test_the_first_weights_of_a_head_of_questions_are_ernies() -> None:
    torch.manual_seed(0)
    head = MultiLabelHead(100, 300, hidden_layer=200, images=True)
    for layer, total in ((head.hidden, 100 + 200), (head.out, 200 + 300)):
        assert layer is not None and not layer.bias.any()
        bound = (3 / total) ** 0.5
        assert 0.99 * bound < float(layer.weight.detach().abs().max()) <= bound
    with pytest.raises(UserError, match=r"tasks\.x\.hidden_layer: 8, but the head of texts alone"):
        build("x", {"kind": "multi_label", "source": "s", "hidden_layer": 8})
