"""palm.load opens what a training left, without its rows, and Hugging Face folders with a head."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch

import palm_ds as palm
from palm_ds.common.errors import UserError
from tests.helpers.small_tables import TINY, rows, write_tables

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
TEXTS = ["w1 w2 w3", "w30 w31", "w5", "w22 w39 w25 w30"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def run(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two tasks over a Dataset and a DataFrame, whose rows are gone. Class 1 of the
    Dataset is `yes`."""
    import random

    given = rows(random.Random(3), 48)
    names = datasets.ClassLabel(names=["no", "yes"])
    kinds = datasets.Features({"sentence": datasets.Value("string"), "label": names})
    columns = {
        "sentence": [row["text_a"] for row in given],
        "label": [["no", "yes"].index(row["label"]) for row in given],
    }
    split = datasets.Dataset.from_dict(columns, features=kinds).train_test_split(0.25, seed=1)
    frame = pd.DataFrame(
        {"text": columns["sentence"], "label": np.arange(48) % 2 * 2.0 + 1.0}  # 1 and 3
    )
    folder = tmp_path_factory.mktemp("runs") / "mine"
    trainer = palm.MultiHeadTrainer(
        [
            palm.tasks.Classification.on(name="mood", train=split),
            palm.tasks.Regression.on(name="stars", train=frame),
        ],
        backbone=palm.Backbone.from_config(TINY, tokenizer=tables / "vocab.txt"),
        folder=folder,
        batch=8,
        epochs=6,
        lr=2e-3,
        length=32,
        deepspeed_config={"zero_optimization": {"stage": 0}},
        recipe={"export_onnx": []},
    )
    scores = trainer.train()
    assert scores["mood"]["accuracy"] > 0.8
    shutil.rmtree(folder / "rows")
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> palm.LoadedModel:
    return palm.load(run, device="cpu")


def test_its_tasks_and_labels(model: palm.LoadedModel) -> None:
    assert list(model.tasks) == ["mood", "stars"]
    assert model.labels == {"mood": ("no", "yes")}


def test_all_kinds_of_rows_have_the_same_predictions(
    model: palm.LoadedModel, tmp_path: Path
) -> None:
    found = model.predict(TEXTS)
    assert [each["label"] for each in found["mood"]] == ["no", "yes", "no", "yes"]
    assert [round(each["value"]) for each in found["stars"]] == [1, 3, 1, 3]
    (tmp_path / "new.tsv").write_text("\n".join(["text_a", *TEXTS]) + "\n")
    as_rows = [{"text_a": text} for text in TEXTS]
    same: list[Any] = [
        (text for text in TEXTS),
        as_rows,
        [{"sentence": text, "label": "?"} for text in TEXTS],
        pd.DataFrame(as_rows),
        datasets.Dataset.from_list(as_rows),
        str(tmp_path / "new.tsv"),
        [tmp_path / "new.tsv"],
        lambda: iter(TEXTS),
    ]
    for given in same:
        assert model.predict(given) == found
    assert model.predict(TEXTS, task="stars") == {"stars": found["stars"]}
    assert model(TEXTS, task="mood") == found["mood"]
    assert model(TEXTS[:1], task="mood")[0]["logits"] == pytest.approx(
        found["mood"][0]["logits"], abs=1e-5
    )
    assert model.predict([]) == {"mood": [], "stars": []}
    long = model(["w30 " * 300_000], task="mood")  # of 1 MB
    assert long[0]["label"] == "yes" and model([""], task="mood")[0]["label"] in ("no", "yes")


def test_a_file_of_another_format(model: palm.LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "new.data").write_text("\n".join(TEXTS) + "\n")
    columns = {"text_a": "text"}
    found = model.predict(tmp_path / "new.data", columns=columns, format="text")
    assert found == model.predict(TEXTS)
    with pytest.raises(UserError, match=r"^format: 'text' is for files, .* in memory; remove it$"):
        model.predict(TEXTS, format="text")


def test_evaluation(model: palm.LoadedModel) -> None:
    labeled = [
        {"text_a": text, "label": label}
        for text, label in zip(TEXTS, ["no", "yes"] * 2, strict=True)
    ]
    assert model.evaluate(labeled, task="mood")["mood"]["accuracy"] == 1.0


def test_rows_without_a_label_are_not_scored(
    model: palm.LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """As by palm-ds predict and palm-ds evaluate."""
    labels = [None, "yes", "", "no"]
    partly = [{"text_a": x, "label": y} for x, y in zip(TEXTS, labels, strict=True)]
    assert model.evaluate(partly, task="mood")["mood"]["accuracy"] == 0.5
    assert "mood: not scored: 2 rows without a label" in caplog.messages
    with pytest.raises(UserError, match=r"^rows: no row has a label$"):
        model.evaluate([{"text_a": "w1", "label": None}], task="mood")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_vectors_are_those_of_the_backbone(run: Path, precision: str) -> None:
    """fp32 whatever the predictions are; the weights are then in memory once."""
    model, backbone = palm.load(run, precision=precision), palm.Backbone.from_pretrained(run)
    for pooling in ("mean", "cls", "pooler"):
        vectors = model.embed(TEXTS, pooling=pooling)
        assert isinstance(vectors, torch.Tensor)
        assert torch.equal(vectors, backbone(TEXTS, pooling=pooling))
    (encoder,) = {each.encoder for each in model._vectors.embedders.values()}
    assert (encoder is model.predictor.model.backbone) == (precision == "fp32")


def test_best_weights_and_checkpoints_open_too(model, run: Path, tmp_path: Path) -> None:
    saved = model.save(tmp_path / "saved")
    (checkpoint,) = sorted((run / "checkpoints").iterdir())[-1:]
    for folder in (saved, run / "weights", checkpoint):
        again = palm.load(folder, tasks=["mood"])
        assert list(again.tasks) == ["mood"]
        assert again(TEXTS) == model(TEXTS, task="mood")


def test_save_pretrained_is_what_transformers_opens(model, tmp_path: Path) -> None:
    """And what palm.load opens again, with the head."""
    import transformers

    folder = model.save_pretrained(tmp_path / "hf", task="mood")
    model.save_pretrained(folder, task="mood")  # once more, over it
    theirs: Any = transformers.pipeline("text-classification", str(folder), device="cpu")
    ours = model(TEXTS, task="mood")
    for each, made in zip(theirs(TEXTS), ours, strict=True):
        assert each["label"] == made["label"]
        assert each["score"] == pytest.approx(max(made["probs"]), abs=1e-5)
    again = palm.load(folder)
    assert again.labels == {"classifier": ("no", "yes")}
    assert [x["probs"] for x in again(TEXTS)] == [pytest.approx(x["probs"], abs=1e-5) for x in ours]
    number = palm.load(model.save_pretrained(tmp_path / "stars", task="stars"))
    wanted = [pytest.approx(each["value"], abs=1e-4) for each in model(TEXTS, task="stars")]
    assert [each["value"] for each in number(TEXTS)] == wanted
    encoder = model.save_pretrained(tmp_path / "encoder")
    assert type(transformers.AutoModel.from_pretrained(encoder)).__name__.endswith("Model")
    with pytest.raises(UserError, match="encoder: is Hugging Face .*, which has no head that pred"):
        palm.load(encoder)


def test_save_pretrained_of_a_task_without_task_embeddings(tables: Path, tmp_path: Path) -> None:
    """And by the name of a repository on the hub, which is in its cache here."""
    given = [palm.tasks.Classification.on(name=x, train=tables / "train.tsv") for x in ("a", "b")]
    plain = palm.Backbone.from_config({**TINY, "task_types": 0}, tokenizer=tables / "vocab.txt")
    made = palm.MultiHeadTrainer(given, backbone=plain, batch=16, epochs=1, length=32)
    made.train()
    model = palm.load(made.folder, device="cpu")
    folder = model.save_pretrained(tmp_path / "hf", task="b")
    wanted = [pytest.approx(each["probs"], abs=1e-5) for each in model(TEXTS, task="b")]
    assert [each["probs"] for each in palm.load(folder)(TEXTS)] == wanted


def test_a_repository_of_the_hub_by_its_name(
    model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--mood"
    model.save_pretrained(repository / "snapshots/0123", task="mood")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123")
    assert [each["label"] for each in palm.load("org/mood")(TEXTS)] == ["no", "yes", "no", "yes"]
    with pytest.raises(UserError, match="org/none: no such file or folder, and it could not be"):
        palm.load("org/none")


def test_a_model_can_be_pickled(model) -> None:
    """As multiprocessing and joblib do."""
    again = pickle.loads(pickle.dumps(model))
    assert again.predict(TEXTS) == model.predict(TEXTS)
    assert torch.equal(again.embed(TEXTS), model.embed(TEXTS))
    assert "2 layers" in repr(again) and len(repr(again)) < 500
    assert model.predict(TEXTS, task="mood").rows == model(TEXTS, task="mood")


CLASSES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "SequenceClassification": ({"problem_type": "multi_label_classification"}, ["w1 w2"]),
    "TokenClassification": ({"id2label": {0: "O", 1: "B-X", 2: "I-X"}}, ["w1 w2 w3"]),
    "QuestionAnswering": ({}, [("w1 w2", "w3 w4 w5")]),
    "MultipleChoice": ({}, [{"text_a": "w1", "choices": ["w2", "w3"]}]),
}


@pytest.mark.parametrize("name", CLASSES)
def test_heads_of_transformers(name: str, tables: Path, tmp_path: Path) -> None:
    """A folder that transformers wrote gives the scores that transformers computes."""
    import transformers

    settings, given = CLASSES[name]
    config = transformers.BertConfig(
        vocab_size=45,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        **({"id2label": {0: "a", 1: "b", 2: "c"}, **settings} if name[0] in "ST" else {}),
    )
    torch.manual_seed(2)
    theirs: Any = getattr(transformers, f"BertFor{name}")(config).eval()
    theirs.save_pretrained(tmp_path)
    shutil.copy(tables / "vocab.txt", tmp_path)
    (made,) = palm.load(tmp_path)(given)
    ids = {"w1": 6, "w2": 7, "w3": 8, "w4": 9, "w5": 10}
    with torch.no_grad():
        if name == "MultipleChoice":
            pairs = torch.tensor([[[2, ids["w1"], 3, ids[w], 3] for w in ("w2", "w3")]])
            segments = torch.tensor([[[0, 0, 0, 1, 1]] * 2])
            scores = theirs(pairs, token_type_ids=segments).logits[0]
            assert made["logits"] == pytest.approx(scores.tolist(), abs=1e-5)
        elif name == "QuestionAnswering":
            row = torch.tensor([[2, 6, 7, 3, 8, 9, 10, 3]])
            out = theirs(row, token_type_ids=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))
            starts, ends = out.start_logits[0, 4:7], out.end_logits[0, 4:7]
            both = torch.triu(starts[:, None] + ends)
            both[torch.tril_indices(3, 3, -1).unbind()] = -np.inf
            first, last = divmod(int(both.argmax()), 3)
            assert made["text"] == " ".join(["w3", "w4", "w5"][first : last + 1])
        elif name == "TokenClassification":
            probs = theirs(torch.tensor([[2, 6, 7, 8, 3]])).logits.softmax(-1)[0, 1:4]
            assert made["tokens"] == ["w1", "w2", "w3"] and len(made["tags"]) == 3
            assert made["probs"] == pytest.approx(probs.max(-1).values.tolist(), abs=1e-3) or (
                made["tags"] != [["O", "B-X", "I-X"][i] for i in probs.argmax(-1)]
            )
        else:
            scores = theirs(torch.tensor([[2, 6, 7, 3]])).logits
            assert made["logits"] == pytest.approx(scores[0].tolist(), abs=1e-5)
            assert made["labels"] == [x for x, s in zip("abc", scores[0], strict=True) if s >= 0]


def test_only_the_texts_that_were_trained_on_are_read(model, run: Path) -> None:
    """A further column of a text changes nothing."""
    alone = model([{"text_a": text} for text in TEXTS], task="mood")
    assert model([{"text_a": text, "text_b": "w30"} for text in TEXTS], task="mood") == alone
    file = run.parent / "pairs.jsonl"
    file.write_text("".join(f'{{"text_a": "{text}", "text_b": "w30"}}\n' for text in TEXTS))
    assert model(str(file), task="mood") == alone


def test_a_saved_model_may_be_saved_where_it_is(model, tmp_path: Path) -> None:
    saved = palm.load(model.save(tmp_path / "model"))
    assert saved.save(saved.folder) == saved.folder
    assert palm.load(saved.folder)(TEXTS, task="mood") == model(TEXTS, task="mood")


def test_mistakes_are_one_line(model, run: Path, tables: Path, tmp_path: Path) -> None:
    pushing = palm.Backbone.from_config(TINY, tokenizer=tables / "vocab.txt")
    backbone = palm.Backbone.from_pretrained(run)
    (tmp_path / "file").write_text("")
    wrong: dict[str, Any] = {
        r"nowhere: no such file or folder": lambda: palm.load(tmp_path / "nowhere"),
        r"min: no such file or folder; did you mean .*mine": lambda: palm.load(f"{run.parent}/min"),
        r"not a checkpoint of a known format": lambda: palm.load(tables),
        r"no task 'moood'; did you mean \"mood\"\?": lambda: model(TEXTS, task="moood"),
        r"no task 'x'": lambda: palm.load(run, tasks=["x"]),
        r"precision: no .fp8.; known: bf16, fp16, fp32": lambda: palm.load(run, precision="fp8"),
        r"task: choose one of mood, stars": lambda: model(TEXTS),
        r"rows: no file 'w1 w2'; put a text into a list: \['w1 w2'\]": lambda: model.predict(
            "w1 w2"
        ),
        r"rows\[1\]: is a pair of texts, but rows\[0\] is a text": lambda: model.predict(
            ["w1", ("w2", "w3")]
        ),
        r"rows: no known column among `body`": lambda: model.predict(pd.DataFrame({"body": ["a"]})),
        r"poling: no such setting": lambda: model.embed(TEXTS, poling="cls"),
        r"file: is a file; give a folder": lambda: model.save_pretrained(tmp_path / "file"),
        r"file: is a file; give a folder$": lambda: model.save(tmp_path / "file"),
        r"device: 'tpu': not a device": lambda: palm.load(run, device="tpu"),
        r"device: 'cuda:77': cannot be used here": lambda: palm.load(run, device="cuda:77"),
        r"device: 'gpu': not a device": lambda: backbone(TEXTS, device="gpu"),
        r"rows: pairs, but mood reads one text, text_a": lambda: model([("w1", "w2")], task="mood"),
        r"^rows: pairs, but mood": lambda: model.evaluate([("w1", "w2", "no")], task="mood"),
        r"has no weights yet": lambda: pushing.save_pretrained(tmp_path / "x"),
    }
    for message, do in wrong.items():
        with pytest.raises(UserError, match=message) as error:
            do()
        assert "\n" not in str(error.value)
