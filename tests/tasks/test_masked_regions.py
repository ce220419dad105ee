"""Masked regions: what is shown, losses restated in numpy, and that they are learned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.tasks.masked_regions import MaskedRegions
from palm_ds.tasks.masked_words import MaskedWords
from tests.helpers.small_images import BOTH, BOXES, COLUMNS, UNIMO, image_rows
from tests.helpers.text_tables import built_of, dataset_of, make_task, model_of, source_of

CLASSES = "regions (classes)"


def task_of(source: Any, **values: Any) -> MaskedRegions:
    return make_task(MaskedRegions, "regions", max_tags=0, **values).resolved(source)


def test_what_is_shown_and_predicted(tmp_path: Path) -> None:
    rows = image_rows(40)
    for row in rows:  # the second region covers the first one by half, the third one is apart
        row["pic"]["boxes"] = [[0, 0, 50, 50], [0, 0, 50, 25], [60, 60, 90, 80]]
    source = source_of(tmp_path, rows, columns=COLUMNS)
    built, _ = built_of(dataset_of(source, task_of(source, rate=0.2)))
    kinds = set()
    for example in (part.example for row in built for part in row):
        (places, targets), shown = example.labels["regions"], example.regions
        assert shown is not None
        region = int(places[0]) - (len(example) - BOXES - 1)
        image = source.regions(example.item)
        assert image.classes is not None
        assert len(places) == 1 and np.array_equal(targets[0], image.features[region - 1])
        assert np.array_equal(example.labels[CLASSES][1][0], image.classes[region - 1])
        hidden = (shown.features[1:] == 0).all(1)
        if hidden.any():  # nine times out of ten
            assert hidden.tolist() == [region < 3, region < 3, region == 3]
        left = image.features[~hidden]
        assert np.allclose(shown.features[0], left.mean(0), atol=1e-6)
        kinds.add((region, bool(hidden.any())))
    assert kinds >= {(1, True), (2, True), (3, True)} and any(not shown for _, shown in kinds)


def test_losses_are_those_of_numpy(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(9), columns=COLUMNS)
    task = task_of(source)
    model = model_of(task, **UNIMO)
    _, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        found, vectors = model(batch), model.backbone(batch).flatten(0, 1)
    head = model.heads["regions"]
    weights = {name: x.detach().double().numpy() for name, x in head.named_parameters()}
    erf = np.vectorize(math.erf)

    def scores(part: str) -> np.ndarray:
        x = vectors[batch.labels[task.name][0]].double().numpy()
        x = x @ weights[f"{part}transform.weight"].T + weights[f"{part}transform.bias"]
        x = x * (1 + erf(x / math.sqrt(2))) / 2
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        x = x * weights[f"{part}norm.weight"] + weights[f"{part}norm.bias"]
        return x @ weights[f"{part}out.weight"].T + weights[f"{part}out.bias"]

    error = (scores("") - batch.labels["regions"][1].numpy()) ** 2
    assert float(found["regions"].loss_sum) == pytest.approx(error.mean(1).sum(), rel=1e-5)
    logits, target = scores("region_classes."), batch.labels[CLASSES][1].double().numpy()
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = (target * (np.log(target) - log)).sum()
    assert float(found[CLASSES].loss_sum) == pytest.approx(expected, rel=1e-5)
    right = (logits.argmax(1) == target.argmax(1)).sum()
    assert int(found[CLASSES].correct) == right
    alone = task_of(source, predict=["classes"], weight=0.5)
    assert alone.loss_weights() == {"regions": 0.5} and alone.classes == 6
    assert not hasattr(model_of(alone, **UNIMO).heads["regions"], "region_classes")
    assert task_of(source, predict=["features"]).loss_weights() == {"regions": 1.0}


def test_baselines_know_the_mean_alone(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(6), columns=COLUMNS)
    task = task_of(source)
    every = [source.regions(item) for item in range(6)]
    features = np.concatenate([image.features for image in every])
    loss, right = task.baseline_of("regions", features, source)
    assert loss.mean() == pytest.approx(features.var(0).mean(), rel=1e-5) and np.isnan(right).all()
    classes = np.concatenate([x.classes for x in every if x.classes is not None])
    loss, right = task.baseline_of(CLASSES, classes, source)
    assert loss.mean() > 0 and 0 < right.mean() < 1
    assert len(task.baseline_of("regions", np.empty(0, int), source)[0]) == 0


def test_settings_and_rows_that_do_not_go_together(tmp_path: Path) -> None:
    rows = image_rows(2)
    for row in rows:
        del row["pic"]["classes"]
    source = source_of(tmp_path, rows, columns=COLUMNS)
    with pytest.raises(UserError, match="no classes, which tasks.regions predicts"):
        task_of(source).check(source, labeled=True)
    task_of(source, predict=["features"]).check(source, labeled=True)
    with pytest.raises(UserError, match="name features, classes or both"):
        task_of(source, predict=[])
    words = make_task(MaskedWords, "words", texts=["text_a"])
    with pytest.raises(UserError, match="the first task of its group builds inputs without images"):
        built_of(dataset_of(source, words, task_of(source, predict=["features"])))


@pytest.mark.slow
@BOTH
def test_regions_and_words_are_learned_from_each_other(
    encoder: dict[str, Any], tmp_path: Path
) -> None:
    """Held-out losses beat those of the means, or of frequencies, by five standard errors."""
    train = source_of(tmp_path, image_rows(200), columns=COLUMNS)
    task = task_of(train)
    words = make_task(MaskedWords, "words", texts=["text_a"])
    model = model_of(task, words, **encoder).train()
    _, batch = built_of(dataset_of(train, task, words, max_length=48))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(90):
        outputs = model(batch)
        optimizer.zero_grad()
        torch.stack([outputs[x].loss_sum / batch.count(x) for x in outputs]).sum().backward()
        optimizer.step()
    held = source_of(tmp_path, image_rows(200, seed=2), columns=COLUMNS)
    _, batch = built_of(dataset_of(held, task, words, max_length=48))
    with torch.no_grad():
        scores = model.eval()(batch, ("regions", "words", CLASSES))
    for name, owner in (("regions", task), (CLASSES, task), ("words", words)):
        targets, found = batch.labels[name][1].numpy(), scores[name].scores
        assert found is not None
        base, _ = owner.baseline_of(name, targets, held)
        gain = base - losses(name, found.double().numpy(), targets)
        assert gain.mean() > 5 * gain.std() / math.sqrt(len(gain)), name


def losses(name: str, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    if name == "regions":
        return ((scores - targets) ** 2).mean(1)
    log = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    if name == "words":
        return -log[np.arange(len(log)), targets]
    return (targets * (np.log(targets) - log)).sum(1)
