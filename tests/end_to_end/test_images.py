"""A recipe of images beside texts: what it trains on, and what the weights that it leaves are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.api import load
from palm_ds.cli.main import main
from palm_ds.tasks.image_text_matching import ImageTextMatching
from palm_ds.tasks.masked_regions import MaskedRegions
from palm_ds.weights.formats.weights_info import WeightsInfo
from palm_ds.weights.weights_folder import save_weights
from tests.helpers.serving import local, opened
from tests.helpers.small_images import COLUMNS, UNIMO, asked_rows, encoded, image_rows
from tests.helpers.text_tables import make_task, model_of, small_tokenizer, source_of

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
seed: 1
backbone: {kind: unimo, preset: unimo-base-en, hidden_size: 16, num_layers: 1, num_heads: 2,
           pad: 0, options: {region_size: 12}}
length: 64
batch: 8 examples
"""
RECIPE = (
    BEGIN
    + """
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
)


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


FINE_TUNING = (
    BEGIN
    + """
sources:
  asked:
    table: asked.jsonl
    tokenizer: vocab.txt
    read: {columns: {text_a: text_a, image: pic, label: worth}}
  found: {table: asked.jsonl, tokenizer: vocab.txt, read: {columns: {image: pic, box: place}}}
  told: {table: asked.jsonl, tokenizer: vocab.txt, read: {columns: {image: pic, target: target}}}
  graded: {table: asked.jsonl, tokenizer: vocab.txt, read: {columns: {image: pic, label: grade}}}
held_out: 0.2
tasks:
  answers: {kind: multi_label, source: asked, images: true, hidden_layer: 8}
  find: {kind: referring_expressions, source: found}
  match: {kind: image_text_matching, source: found}
  rank: {kind: ranking, source: graded, images: true, loss: circle, negative_images: 2,
         max_length: 20}
  tell: {kind: generation, source: told, images: true, decoder: next_token, end: mask,
         max_target: 8}
stages: [{answers: 1, find: 1, match: 1, rank: 1, tell: 1}]
"""
)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Numbers to 1e-5."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == (value if isinstance(value, str) else pytest.approx(value, abs=1e-5))


@pytest.mark.slow
def test_a_run_predicts_with_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In files, from Python and on a server; in graphs it is refused."""
    rows = asked_rows(20)
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_files(tmp_path)
    (tmp_path / "recipe.yaml").write_text(FINE_TUNING)
    monkeypatch.chdir(tmp_path)
    machine = ["--deepspeed_config", str(ROOT / "ds_configs/cpu.json"), "--run_dir", "run"]
    assert main(["finetune", "recipe.yaml", *machine, "--quiet"]) == 0
    assert main(["predict", "run", "--input", "asked.jsonl", "--output", "out", "--quiet"]) == 0
    first, *_ = map(json.loads, Path("out/answers.predictions.json").read_text().splitlines())
    scores = json.loads(Path("out/scores.json").read_text())
    assert "soft_accuracy" in json.dumps(scores) and "accuracy" in json.dumps(scores)
    given = {key: rows[0][key] for key in ("text_a", "pic")}
    alone = {name: found[0] for name, found in load("run").predict([given]).items()}
    assert alone["answers"]["best"] == first["best"]
    assert alone["answers"]["probs"] == pytest.approx(first["probs"])
    for name in ("match", "tell", "rank"):
        (line, *_) = Path(f"out/{name}.predictions.json").read_text().splitlines()
        same(json.loads(line), {"index": 0, **alone[name]})
    assert list(alone["match"]) == ["label", "logits", "probs"]  # of the pair as it is
    models, served = opened(run=Path("run"))
    with local(models, served) as server:
        answer = server.answer("/predict/find", {"inputs": [given]})["predictions"][0]
        assert answer["box"] == pytest.approx(given["pic"]["boxes"][answer["region"]], abs=0.01)
        for name in ("match", "tell", "rank"):
            (answer,) = server.answer(f"/predict/{name}", {"inputs": [given]})["predictions"]
            same(answer, alone[name])
        (about,) = server.get("/info").json()["models"]
        for task in about["tasks"]:  # what the page sends
            fields = [x for x in task["form"]["fields"] if not x["optional"]]
            row = {x["role"]: given["pic" if x["parsed"] else "text_a"] for x in fields}
            assert "image" in row
            (answer,) = server.answer(f"/predict/{task['name']}", {"inputs": [row]})["predictions"]
            if task["name"] != "tell":  # it has no text there
                same(answer, alone[task["name"]])
        caption = server.answer("/predict/tell", {"inputs": [{"pic": given["pic"]}]})
        assert caption["predictions"][0]["text"] == alone["tell"]["text"]
        for image, message in (
            ("../7.npz", "image: a name; give the regions"),
            (7, "image: a name; give the regions"),
            (None, "no column"),
        ):
            row = {"text_a": "so a ?"} | ({"pic": image} if image else {})
            assert message in server.refusal("/predict/answers", {"inputs": [row]})[1]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["convert", "run", "graph", "--to", "onnx", "--head", "answers"])
    assert "head 'answers' reads images, but graphs read only texts" in capsys.readouterr().err


def test_the_page_makes_regions_of_a_detectors_output(tmp_path: Path) -> None:
    """With a YOLOS of noise: what its page's function returns is read as regions."""
    from transformers import YolosConfig, YolosForObjectDetection

    page = (ROOT / "docs/images.md").read_text()
    code = next(x for x in re.findall(r"```python\n(.*?)```", page, re.S) if "image_of" in x)
    names: dict[str, Any] = {}
    exec(code, names)
    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=[32, 32],
        patch_size=16,
        num_detection_tokens=6,
        id2label={0: "a", 1: "b", 2: "c"},
    )
    torch.manual_seed(0)
    model = YolosForObjectDetection(config).eval()
    pixels = torch.randn(1, 3, 32, 32)
    image = names["image_of"](model, pixels, 640, 480, most=4)
    source = source_of(tmp_path, [{"text_a": "so", "pic": image}], columns={"image": "pic"})
    found = source.regions(0)
    assert found.features.shape == (4, 16) and found.classes is not None
    with torch.no_grad():
        output = model(pixel_values=pixels)
    sure = output.logits[0].softmax(-1)[:, :3].max(-1).values.topk(4).indices.sort().values
    assert np.allclose(found.features, output.last_hidden_state[0, -6:][sure], atol=1e-5)
    width = found.locations[:, 2] - found.locations[:, 0]
    assert (width <= output.pred_boxes[0, sure, 2].numpy() + 1e-5).all() and (width > 0).all()
