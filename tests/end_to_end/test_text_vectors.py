"""Vectors that a run trains: they search better, and every program makes the same ones of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from palm_ds.api.loaded_model import load
from palm_ds.data.reader import open_table
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.report.metrics_file import read_metrics
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from palm_ds.weights.convert.convert import convert
from palm_ds.weights.convert.merge import MergeOptions, merge_checkpoints, sources_of
from palm_ds.weights.convert.resize import ResizeOptions, resize_checkpoint
from palm_ds.weights.formats.huggingface.sentence_transformers import modules_of

TOPICS = 20
SHIPPED = Path(__file__).resolve().parents[2] / "launch"
FEW = {"table": "few.jsonl", "tokenizer": "vocab.txt"}
DS_CONFIG = make_ds_config({"zero_optimization": {"stage": 0}})


def write_rows(folder: Path) -> None:
    """A query and its positive share a topic, but no word. The last held-out rows are only texts to
    search in."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(4 * TOPICS))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    rng = random.Random(0)

    def text(first: int) -> str:
        return " ".join(f"w{first + rng.randrange(2)}" for _ in range(rng.randrange(3, 9)))

    def row(topic: int) -> dict[str, Any]:
        return {"query": text(4 * topic), "positive": text(4 * topic + 2)}

    found = {
        "train": [row(i % TOPICS) for i in range(10 * TOPICS)],
        "dev": [*map(row, range(TOPICS)), *({"query": None, "positive": "w0 w5"} for _ in "ab")],
    }
    for name, rows in found.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def values_of(folder: Path, task: dict[str, Any], *, lr: float, **more: Any) -> dict[str, Any]:
    """A recipe of a task over the rows of `write_rows`, without its stages."""
    return {
        "backbone": {"preset": "tiny", "max_positions": 32, "dropout": 0.0},
        "length": 64,
        "batch": "16 examples",
        "optimizer": {"lr": lr},
        "schedule": {"kind": "constant"},
        "sources": {
            "texts": {
                "table": str(folder / "train.jsonl"),
                "validation": str(folder / "dev.jsonl"),
                "tokenizer": str(folder / "vocab.txt"),
            }
        },
        "tasks": {"found": {"source": "texts", "max_length": 16, **task}},
        "log": {"every": 30},
        **more,
    }


@pytest.mark.slow
def test_what_becomes_of_checkpoints_is_used_as_they_were_trained(tmp_path: Path) -> None:
    """Merged, converted, resized: with the run's pooling, its preparation of texts, its tasks."""
    write_rows(tmp_path)
    values = values_of(tmp_path, {"kind": "retrieval", "k": 3, "pooling": "cls"}, lr=1.0e-3)
    values |= {"stages": [{"found": 4}], "save": {"every": 2, "keep": 2}, "export_onnx": []}
    values["sources"]["texts"]["read"] = {"simplify": True}
    run = RunSpec(recipe=make_recipe(values, "r"), ds_config=DS_CONFIG, folder=tmp_path / "run")
    assert train(run) == 0
    newest = run.checkpoints / "step_00000004"
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("w0w0\n")
    merge_checkpoints(sources_of([run.folder], last=2), tmp_path / "merged", MergeOptions())
    convert(newest, tmp_path / "converted")
    convert(newest, tmp_path / "hf", to="huggingface")
    resize_checkpoint(newest, tmp_path / "resized", ResizeOptions(tokens=tokens))
    for name in ("run", "run/hf", str(newest), "merged", "converted", "hf", "resized"):
        opened = TrainedModel.open(tmp_path / name)
        settings = opened.embedder().settings
        assert (settings.pooling, settings.normalize, settings.max_length) == ("cls", True, 16)
        assert modules_of(opened.contents).trained
        normalizer = opened.text_tokenizer.backend.normalizer
        assert normalizer is not None and normalizer.normalize_str("臺灣").split() == ["台", "湾"]
        if "hf" not in name:
            assert list(opened.predictor().tasks) == ["found"]
    resized = TrainedModel.open(tmp_path / "resized")
    for tokenizer in (resized.tokenizer, resized.text_tokenizer):
        assert tokenizer.encode_words(["w0w0"])[0] == [resized.tokenizer.size - 1]
    vectors = [TrainedModel.open(tmp_path / x).embedder().embed(["w0 w5"]) for x in ("run", "hf")]
    np.testing.assert_allclose(*vectors, atol=1e-6)


@pytest.mark.slow
def test_a_run_of_retrieval_is_used_as_it_was_trained(tmp_path: Path) -> None:
    write_rows(tmp_path)
    task = {"kind": "retrieval", "k": 3, "pooling": "cls", "matryoshka": [8]}
    values = values_of(tmp_path, task, lr=1.0e-3, export_onnx=[])
    values |= {"stages": [{"found": 1}, {"found": 39}], "evaluate": {"every": 20}}
    run = RunSpec(recipe=make_recipe(values, "r"), ds_config=DS_CONFIG, folder=tmp_path / "run")
    assert train(run) == 0
    evaluations = read_metrics(run.folder / "metrics.jsonl").evaluations
    first, last = (evaluations[i]["scores"]["found"] for i in (0, -1))
    assert first["count"] == TOPICS  # the rows that have a query
    assert last["metrics"]["ndcg@3"] > first["metrics"]["ndcg@3"] + 0.2
    assert last["loss"] < first["loss"] and last["accuracy"] > first["accuracy"]

    dev = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().split("\n")[:5]]
    embedder = TrainedModel.open(run.folder).embedder()
    settings = embedder.settings
    assert (settings.pooling, settings.normalize, settings.max_length) == ("cls", True, 16)
    queries = embedder.embed([row["query"] for row in dev])
    texts = embedder.embed([row["positive"] for row in dev])
    predictor = TrainedModel.open(run.folder).predictor()
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dev))
    source = predictor.source(open_table(str(tmp_path / "new.jsonl")))
    (chunk,) = predictor.predict(predictor.passes[0], source)
    predicted = [each["score"] for each in chunk.predictions["found"]]
    np.testing.assert_allclose(predicted, (queries * texts).sum(1), atol=2e-6)
    assert not any("vectors" in each for each in chunk.predictions["found"])

    sentence_transformers = pytest.importorskip("sentence_transformers", reason="not installed")
    other = sentence_transformers.SentenceTransformer(str(run.folder / "hf"), device="cpu")
    np.testing.assert_allclose(other.encode([row["query"] for row in dev]), queries, atol=1e-5)
    assert other.similarity_fn_name == "cosine"


@pytest.mark.slow
def test_sparse_vectors_are_those_of_a_sparse_encoder(tmp_path: Path) -> None:
    """Trained, then the same from palm_ds, in files and by sentence-transformers."""
    write_rows(tmp_path)
    weights = {"query_regularizer_weight": 0.02, "document_regularizer_weight": 0.02}
    values = values_of(tmp_path, {"kind": "sparse_retrieval", "k": 3, **weights}, lr=2.0e-3)
    values |= {"stages": [{"found": 40}], "evaluate": {"every": 40}}
    run = RunSpec(recipe=make_recipe(values, "r"), ds_config=DS_CONFIG, folder=tmp_path / "run")
    assert train(run) == 0
    (last,) = read_metrics(run.folder / "metrics.jsonl").evaluations
    metrics = last["scores"]["found"]["metrics"]
    assert next(iter(metrics)) == "ndcg@3" and metrics["ndcg@3"] > 0.5
    assert 0 < metrics["query_active_dims"] < 80

    dev = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    texts = [*dict.fromkeys(row["positive"] for row in dev)]
    queries = [row["query"] for row in dev if row["query"]]
    made = TrainedModel.open(run.folder).embedder()
    assert made.settings.pooling == "splade" and made.settings.max_length == 16
    vectors = made.vectors(texts)
    found = [each.active.mean() for each in (vectors, made.vectors(queries))]
    assert found == pytest.approx([metrics["document_active_dims"], metrics["query_active_dims"]])
    np.testing.assert_allclose(vectors.toarray(), made.embed(texts), atol=1e-6)
    assert not (run.folder / "hf" / "onnx").exists()

    st = pytest.importorskip("sentence_transformers", reason="not installed")
    encoder = st.SparseEncoder(str(run.folder / "hf"), device="cpu")
    theirs = encoder.encode(texts, convert_to_sparse_tensor=False).numpy()
    np.testing.assert_allclose(theirs, vectors.toarray(), atol=1e-5)
    assert encoder.similarity_fn_name == "dot" and encoder.max_seq_length == 16
    words = load(run.folder).words(texts[0])[0]
    decoded = dict(encoder.decode(encoder.encode(texts[:1])[0]))
    assert words == pytest.approx(decoded, abs=1e-5) and list(words) == list(decoded)
    # and back: what it writes itself
    encoder.max_active_dims = 5
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = TrainedModel.open(tmp_path / "saved").embedder().vectors(texts)
    few = encoder.encode(texts, convert_to_sparse_tensor=False).numpy()
    np.testing.assert_allclose(again.toarray(), few, atol=1e-5)
    assert again.active.max() == 5


def test_few_labeled_texts_make_pairs_and_then_classes(tmp_path: Path) -> None:
    """The shipped recipe with an encoder of its own; the second stage trains its head alone."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(24))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    rng = random.Random(0)

    def row(number: int) -> dict[str, str]:
        own = range(number % 3, 24, 3)  # the words of its class
        return {"text": " ".join(f"w{x}" for x in rng.sample(own, 3)), "label": f"c{number % 3}"}

    train_rows, dev = [row(n) for n in range(24)], [row(n) for n in range(60)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train_rows))
    recipe = SHIPPED / "recipes/finetune/few_shot.yaml"
    values: dict[str, Any] = yaml.safe_load(recipe.read_text("utf-8"))
    del values["init_from"]
    values["backbone"] = {"kind": "bag_of_words", "hidden_size": 32}
    values["sources"]["few"] |= {k: str(tmp_path / v) for k, v in FEW.items()}
    values |= {"optimizer": {"lr": 1.0e-2}, "export_onnx": []}
    models = []
    for steps in (1, values["stages"][1]["topic"]):
        values["stages"][1]["topic"] = steps
        run = RunSpec(
            recipe=make_recipe(values, "r"), ds_config=DS_CONFIG, folder=tmp_path / f"run{steps}"
        )
        assert train(run) == 0
        models.append(load(run.folder))
    states = [model.predictor.model.state_dict() for model in models]
    changed = {name for name, x in states[0].items() if not torch.equal(x, states[1][name])}
    assert changed == {"heads.topic.out.weight", "heads.topic.out.bias"}
    made = models[1].predict([row["text"] for row in dev])["topic"]
    right = [x["label"] == row["label"] for x, row in zip(made, dev, strict=True)]
    assert np.mean(right) > 0.9
    vectors = models[1].embed([row["text"] for row in dev])
    same = np.equal.outer(*[[row["label"] for row in dev]] * 2)
    cosines = np.asarray(vectors) @ np.asarray(vectors).T
    assert cosines[same].mean() > cosines[~same].mean() + 0.5
