"""Heads of means: sentence-transformers' CrossEncoder computes the same from what is written, and
it is read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from palm_ds import load
from palm_ds.common.errors import UserError
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.train.export import head_taken
from palm_ds.weights import weights_folder
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.huggingface.model_card import Provenance
from palm_ds.weights.formats.native import WEIGHTS
from tests.helpers.saved_model import TASKS, recipe_of, save_model
from tests.helpers.text_tables import small_tokenizer
from tests.weights.formats.hf_models import make, save

TEXTS = ["so good .", "very bad , so bad ?", "a", "good bad so very"]
SIZES: dict[str, Any] = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 64}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, "task_types": 0},
    "ernie": {**SIZES, "task_types": 3},
    "modernbert": {**SIZES, "kind": "modernbert"},
}
DENSE, SETTINGS = "2_Dense/config.json", "config_sentence_transformers.json"


def written(folder: Path, name: str, encoder: str = "bert", **more: Any) -> Path:
    """The run of one task with a head of means, and its hf/ beside it."""
    task = {**TASKS[name], **more, "pooling": "mean"}
    if encoder == "ernie":
        task["task_id"] = 2
    run = save_model(folder / "run", [name], tasks={name: task}, backbone=ENCODERS[encoder])
    model = TrainedModel.open(run).predictor().model
    taken = head_taken(recipe_of(run), model.state_dict())
    weights_folder.export_hf(
        model,
        folder / "hf",
        config=model.backbone.config,
        tokenizer=small_tokenizer(),
        head=taken,
        made=Provenance(source="a test"),
    )
    return run


def scores(folder: Path, task: str) -> np.ndarray:
    """(texts, any) as decoded, before softmax and the like."""
    found = load(folder).predict(TEXTS)[task]
    return np.array([np.ravel(each.get("logits", each.get("value", 0.0))) for each in found])


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("name", ["mood", "topic", "size"])
def test_a_cross_encoder_gives_the_same_scores(name: str, encoder: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("sentence_transformers", reason="not installed")
    more = {"scale": True} if name == "size" else {}
    run = written(tmp_path, name, encoder, **more)
    model = transformers.CrossEncoder(str(tmp_path / "hf"), device="cpu")
    theirs = np.stack([np.ravel(model.predict(text)) for text in TEXTS])
    ours = scores(run, name)
    np.testing.assert_allclose(theirs, ours, atol=2e-5)
    np.testing.assert_allclose(scores(tmp_path / "hf", "classifier"), ours, atol=2e-5)
    if name != "size":
        labels = recipe_of(run).tasks[name]["labels"]
        assert [model.config.id2label[i] for i in range(len(labels))] == list(labels)
    card = (tmp_path / "hf/README.md").read_text()
    assert "library_name: sentence-transformers" in card and "CrossEncoder(MODEL)" in card


def test_the_example_of_the_card_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sentence_transformers", reason="not installed")
    for name, shown in (("mood", "fair"), ("topic", "sport"), ("size", "")):
        written(tmp_path / name, name)
        card = (tmp_path / name / "hf/README.md").read_text()
        example = card.split("```python\n")[1].split("```")[0]
        exec(example.replace('"."', repr(str(tmp_path / name / "hf"))), {})
        assert shown in capsys.readouterr().out


def test_it_survives_a_round_trip(tmp_path: Path) -> None:
    written(tmp_path, "mood")
    convert(tmp_path / "hf", tmp_path / "weights", "palm_ds", ConversionOptions(strict=True))
    convert(tmp_path / "weights", tmp_path / "back", "huggingface", ConversionOptions(strict=True))
    for file in (DENSE, SETTINGS, "modules.json", "1_Pooling/config.json", "config.json"):
        assert (tmp_path / "back" / file).read_text() == (tmp_path / "hf" / file).read_text(), file
    for file in ("2_Dense/model.safetensors", "model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    head = load_file(tmp_path / "weights" / WEIGHTS)
    assert {x for x in head if x.startswith("heads.")} == {
        "heads.classifier.out.weight",
        "heads.classifier.out.bias",
    }


@pytest.mark.parametrize(
    "file, key, value",
    [
        (DENSE, "activation_function", "torch.nn.modules.activation.Tanh"),
        (DENSE, "module_output_name", "sentence_embedding"),
        (DENSE, "use_residual", True),
        (SETTINGS, "model_type", "SentenceTransformer"),
        ("1_Pooling/config.json", "pooling_mode", "cls"),
    ],
)
def test_other_modules_are_no_such_head(file: str, key: str, value: object, tmp_path: Path) -> None:
    written(tmp_path, "mood")
    path = tmp_path / "hf" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match="has no head that predicts"):
        TrainedModel.open(tmp_path / "hf").predictor()


@pytest.mark.parametrize(
    "setting",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},  # before 4.0
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ],
)
def test_a_reranker_of_transformers_keeps_its_activation(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    """Without it a CrossEncoder of one score takes the sigmoid."""
    source = save(make("bert", "ForSequenceClassification", num_labels=1), tmp_path / "in")
    about = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(about | setting))
    convert(source, tmp_path / "out", "huggingface", ConversionOptions(verify=False))
    assert setting.items() <= json.loads((tmp_path / "out/config.json").read_text()).items()


def test_no_class_of_transformers_takes_it(tmp_path: Path) -> None:
    run = written(tmp_path, "mood")
    for ending in ("ForSequenceClassification", "ForTokenClassification"):
        options = ConversionOptions(head="mood", head_class=ending)
        with pytest.raises(UserError, match=f"reads the means of tokens, which Bert{ending} does"):
            convert(run, tmp_path / "other", "huggingface", options)
    plain = save_model(tmp_path / "plain", ["mood"])
    options = ConversionOptions(head="mood", head_class="CrossEncoder")
    with pytest.raises(UserError, match='"mood" reads whole texts, which CrossEncoder does not'):
        convert(plain, tmp_path / "other", "huggingface", options)
