"""Sparse vectors of a folder that sentence-transformers' SparseEncoder wrote: in Python, in files,
on pipes and in an index; and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

import palm_ds as palm
from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from tests.helpers.text_tables import SPECIALS, WORDS

TEXTS = ["so good", "very bad ?", "a b c good", "so very"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BertForMaskedLM."""
    folder = tmp_path_factory.mktemp("sparse") / "bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIALS) + len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.4,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(plain: Path) -> Any:
    st = pytest.importorskip("sentence_transformers", reason="no sentence-transformers")
    return st.SparseEncoder(str(plain), device="cpu")


@pytest.fixture(scope="module")
def saved(plain: Path, encoder: Any) -> Path:
    """The same as a SparseEncoder."""
    folder = plain.with_name("encoder")
    encoder.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def wanted(encoder: Any) -> np.ndarray:
    return encoder.encode(TEXTS, convert_to_sparse_tensor=False).numpy()


def test_vectors_and_their_words(plain: Path, saved: Path, encoder: Any, wanted: Any) -> None:
    backbone = palm.Backbone.from_pretrained(saved)
    found = backbone(TEXTS)
    assert isinstance(found, torch.Tensor) and found.layout == torch.sparse_coo
    np.testing.assert_allclose(found.to_dense().numpy(), wanted, atol=1e-5)
    alone = palm.Backbone.from_pretrained(plain)
    assert alone(TEXTS).shape == (4, 16)  # nothing says that it is one
    again = alone(TEXTS, pooling="splade")
    np.testing.assert_allclose(again.to_dense().numpy(), wanted, atol=1e-5)
    for words, decoded in zip(
        backbone.words(TEXTS), encoder.decode(encoder.encode(TEXTS)), strict=True
    ):
        assert list(words) == [token for token, _ in decoded]
        assert words == pytest.approx(dict(decoded), abs=1e-5)
    with pytest.raises(UserError, match=re.escape("(mean) have no words")):
        alone.words(TEXTS)
    few = backbone(TEXTS, max_active_dims=3).to_dense().numpy()
    theirs = encoder.encode(TEXTS, max_active_dims=3, convert_to_sparse_tensor=False).numpy()
    np.testing.assert_allclose(few, theirs, atol=1e-5)


def test_files_pipes_and_an_index(
    saved: Path, wanted: np.ndarray, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    given, output = ["--input", str(tmp_path / "texts.txt")], tmp_path / "v.npz"
    assert main(["embed", str(saved), *given, "--output", str(output), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["active"] == np.count_nonzero(wanted) / 4 and record["size"] == wanted.shape[1]
    np.testing.assert_allclose(scipy.sparse.load_npz(output).toarray(), wanted, atol=1e-5)
    assert json.loads(output.with_name("v.npz.json").read_text())["settings"]["pooling"] == "splade"

    index = str(tmp_path / "index")
    assert main(["index", "build", index, str(saved), str(tmp_path / "texts.txt"), "--quiet"]) == 0
    assert main(["index", "search", index, "so good", "--json", "--top", "4"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    scores = wanted @ wanted[0]
    order = np.argsort(-scores, kind="stable")
    assert [line["text"] for line in lines[-4:]] == [TEXTS[n] for n in order]
    np.testing.assert_allclose([x["score"] for x in lines[-4:]], scores[order], rtol=1e-4)
    assert main(["index", "info", index]) == 0
    assert "searched by the texts of each word" in capsys.readouterr().out


def test_refused(saved: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "texts.txt").write_text("so good\n")
    start = ["embed", str(saved), "--input", str(tmp_path / "texts.txt"), "--output"]
    for more, message in (
        (["v.npy"], "sparse vectors (splade) are written as SciPy's .npz"),
        (["v.npz", "--dtype", "float16"], "sparse vectors are float32"),
        (["v.npz", "--pooling", "mean"], "its suffix must be one of .npy, .parquet"),
        (["v.npy", "--pooling", "mean", "--max_active_dims", "3"], "only for sparse vectors"),
        (["v.npz", "--pooling", "splade", "--dimensions", "3"], "give max_active_dims"),
        (["v.npz", "--pooling", "splade", "--layers", "1"], "splade's masked-LM head reads"),
    ):
        with pytest.raises(SystemExit):
            main([*start, str(tmp_path / more[0]), *more[1:]])
        assert message in " ".join(capsys.readouterr().err.split())
    settings = next(saved.glob("*SpladePooling/config.json"))
    about = settings.read_text()
    settings.write_text(about.replace('"max"', '"sum"'))
    try:
        with pytest.raises(UserError, match="SpladePooling with pooling_strategy"):
            TrainedModel.open(saved).embedder()
    finally:
        settings.write_text(about)


def test_a_model_without_the_head_is_refused(saved: Path, tmp_path: Path) -> None:
    from transformers import BertModel

    BertModel.from_pretrained(saved).save_pretrained(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((saved / name).read_bytes())
    with pytest.raises(UserError, match="splade needs a masked-LM head; it has none"):
        TrainedModel.open(tmp_path / "bare").embedder(EmbeddingSettings(pooling="splade"))
    rows = [{"query": "so ?", "positive": text} for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "init_from": str(tmp_path / "bare"),
        "length": 32,
        "batch": "2 examples",
        "sources": {"s": {"table": str(tmp_path / "rows.jsonl")}},
        "tasks": {"found": {"kind": "sparse_retrieval", "source": "s"}},
        "stages": [{"found": 1}],
        "held_out": 0,
    }
    how = make_ds_config({"zero_optimization": {"stage": 0}})
    with pytest.raises(UserError, match="tasks.found: sparse vectors are read from the masked-LM"):
        train(RunSpec(recipe=make_recipe(values), ds_config=how, folder=tmp_path / "run"))
