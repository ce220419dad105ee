"""A linear probe, against transformers' vectors and scikit-learn's classifier."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertModel, BertTokenizerFast

from palm_ds.common.errors import UserError
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.train.evaluate.probe import Probe, fit_linear, open_probe
from palm_ds.train.recipe.sections import ProbeSettings
from tests.helpers.bert_folder import write_bert

LENGTH = 16
WORDS = [f"w{i}" for i in range(30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), BertModel, WORDS, length=LENGTH)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of texts, some longer than the model reads."""
    rng, file = np.random.default_rng(3), tmp_path_factory.mktemp("rows") / "rows.tsv"
    lines = ["text_a\ttext_b\tlabel"]
    for _ in range(60):
        one, other = (" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(2))
        lines.append(f"{one}\t{other}\t{rng.choice(['no', 'yes', 'maybe'])}")
    file.write_text("\n".join(lines))
    return file


def opened(model: Path, table: Path, **settings: Any) -> Probe:
    tokenizer = TrainedModel.open(model).tokenizer
    wanted = ProbeSettings(table=str(table), **settings)
    return open_probe(wanted, tokenizer, task="a", task_id=0, length=LENGTH, segments=2)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_classifier_is_scikit_learns(classes: int) -> None:
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(classes)
    targets = rng.integers(0, classes, 200)
    vectors = rng.normal(size=(200, 8)) * 10.0 ** rng.integers(-3, 3, 8)
    vectors[np.arange(200), targets] += 2.0
    vectors[:, 7] = 5.0  # a constant
    scores = fit_linear(vectors, targets, classes)(vectors)
    spread = np.where(vectors.std(0) > 0, vectors.std(0), 1)
    inputs = (vectors - vectors.mean(0)) / spread
    # Theirs has one vector for two classes, whose penalty is twice that of two opposite ones.
    theirs = LogisticRegression(C=1.0 if classes > 2 else 2.0, tol=1e-10, max_iter=5000)
    expected = theirs.fit(inputs, targets).predict_proba(inputs)
    found = torch.softmax(torch.from_numpy(scores), 1).numpy()
    assert found == pytest.approx(expected, abs=1e-4)
    assert (fit_linear(vectors, targets, classes)(vectors) == scores).all()


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_vectors_are_those_of_transformers_in_any_batches(
    model: Path, table: Path, pooling: str
) -> None:
    probe, bert = opened(model, table, pooling=pooling), BertModel.from_pretrained(model).eval()
    tokenizer = BertTokenizerFast.from_pretrained(model)
    encoder = TrainedModel.open(model).embedder().encoder
    calls: list[int] = []

    def read(batch: Any) -> torch.Tensor:
        calls[-1] += 1
        with torch.no_grad():
            return probe.vectors_of(encoder, batch)

    def vectors(rows: int, world: int) -> np.ndarray:
        parts = []
        for rank in range(world):
            calls.append(0)
            parts.append(probe.vectors(read, rows=rows, rank=rank, world=world))
        assert len(set(calls[-world:])) == 1  # ZeRO 3 needs equally many forward passes
        assert (np.abs(parts).sum(2) > 0).sum(0).tolist() == [1] * 60  # every text is read once
        return np.sum(parts, axis=0)

    state, rng = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    found = vectors(rows=4, world=1)
    score = probe.score(found)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == rng  # noqa: NPY002
    assert vectors(rows=1, world=3) == pytest.approx(found, abs=1e-5)
    assert vectors(rows=50, world=2) == pytest.approx(found, abs=1e-5)  # one has no text

    rows = [side.source.row(i) for side in probe.sides for i in range(len(side.source))]
    for row, vector in zip(rows, found, strict=True):
        inputs = tokenizer(
            row["text_a"],
            row["text_b"],
            truncation="longest_first",
            max_length=LENGTH,
            return_tensors="pt",
        )
        with torch.no_grad():
            hidden = bert(**inputs).last_hidden_state[0]
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0)}[pooling]
        assert vector == pytest.approx(expected.numpy(), abs=1e-5)

    labels = [row["label"] for row in rows]
    fitted = len(probe.sides[0].source)
    assert score.sizes == (3, fitted, 60 - fitted) and 6 <= 60 - fitted <= 20
    usual = max(sorted(set(labels)), key=labels[:fitted].count)
    assert score.baseline_accuracy == np.mean([label == usual for label in labels[fitted:]])


def test_vectors_that_are_no_numbers_give_no_accuracy(model: Path, table: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        score = opened(model, table).score(np.full((60, 4), np.nan, np.float32))
    assert np.isnan(score.accuracy) and np.isnan(score.loss)


def test_a_sample_of_the_rows_is_always_the_same(model: Path, table: Path) -> None:
    few, again = (opened(model, table, validation=str(table), rows=20) for _ in range(2))
    assert [len(side.source) for side in few.sides] == [20, 20]
    for one, other in zip(few.sides, again.sides, strict=True):
        assert one.source.numbers.tolist() == other.source.numbers.tolist()


@pytest.mark.parametrize(
    ("rows", "validation", "message"),
    [
        ("text_a\tlabel\nw1\tx\nw2\tx\n", "", "'x' is the only label; there must be two or more"),
        ("text_a\tlabel\nw1\tx\nw2\ty\n", "text_a\tlabel\nw1\tz\n", "2: label: unknown label 'z'"),
        ("text_a\nw1\n", "", "has no column 'label'"),
    ],
)
def test_rows_that_cannot_be_used(
    model: Path, tmp_path: Path, rows: str, validation: str, message: str
) -> None:
    (tmp_path / "rows.tsv").write_text(rows)
    (tmp_path / "validation.tsv").write_text(validation)
    more = {"validation": str(tmp_path / "validation.tsv")} if validation else {}
    with pytest.raises(UserError, match=message):
        opened(model, tmp_path / "rows.tsv", **more)
