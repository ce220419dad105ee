"""A recipe of images beside texts: what it trains on, and what the weights that it leaves are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from palm_ds.cli.main import main
from palm_ds.tasks.image_text_matching import ImageTextMatching
from palm_ds.tasks.masked_regions import MaskedRegions
from palm_ds.weights.formats.weights_info import WeightsInfo
from palm_ds.weights.weights_folder import save_weights
from tests.helpers.small_images import COLUMNS, UNIMO, encoded, image_rows
from tests.helpers.text_tables import make_task, model_of, small_tokenizer, source_of

RECIPE = """
seed: 1
backbone: {kind: unimo, preset: unimo-base-en, hidden_size: 16, num_layers: 1, num_heads: 2,
           pad: 0, options: {region_size: 12}}
length: 64
batch: 8 examples
sources:
  pairs:
    table: pairs.tsv
    tokenizer: vocab.txt
    read: {columns: {image: name, object_tags: tags}, images: [features.tsv]}
tasks:
  masked_regions: {source: pairs}
  masked_words: {source: pairs, texts: [text_a]}
stages: [{masked_regions + masked_words: 2}]
"""


def write_files(folder: Path) -> None:
    """A table that names its images, ERNIE's lines of features, a vocabulary and a recipe."""
    pairs, lines = ["text_a\tname\ttags"], []
    for number, row in enumerate(image_rows(12)):
        pairs.append(f"{row['text_a']}\t{number}\t{row['tags']}")
        image = row["pic"]
        arrays = [encoded(np.array(image[x])) for x in ("boxes", "features", "classes")]
        lines.append("\t".join([str(number), "100", "90", "3", *arrays]))
    (folder / "pairs.tsv").write_text("\n".join(pairs) + "\n")
    (folder / "features.tsv").write_text("\n".join(lines) + "\n")
    tokens = small_tokenizer().tokens(range(small_tokenizer().size))
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE)


def test_a_recipe_shows_what_it_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "recipe.yaml", "--rows", "1"]) == 0
    assert "masked_regions: 1 vector at " in capsys.readouterr().out
    assert main(["inspect", "recipe.yaml", "--json", "--rows", "1"]) == 0
    labels = json.loads(capsys.readouterr().out.splitlines()[0])["labels"]
    assert list(labels["masked_regions"][0]) == ["position"] and labels["masked_words"]


def test_show_says_what_the_heads_are_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_of(tmp_path, image_rows(2), columns=COLUMNS)
    tasks = [
        make_task(kind, name).resolved(source)
        for kind, name in ((MaskedRegions, "regions"), (ImageTextMatching, "match"))
    ]
    model = model_of(*tasks, **UNIMO)
    save_weights(model, tmp_path / "w", WeightsInfo(backbone=model.backbone.config))
    assert main(["show", str(tmp_path / "w")]) == 0
    text = capsys.readouterr().out
    assert "regions (regions of images)" in text and "match (images that match texts)" in text
    assert "kind unimo" in text and "'region_size': 12" in text
