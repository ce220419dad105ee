"""A backbone is called on texts or ids and gives their vectors."""

from __future__ import annotations

import pickle

import numpy as np
import pandas
import pytest
import torch

import palm_ds as palm
from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.trained_model import TrainedModel
from tests.inference.test_embedder import TEXTS, TOKENIZER, run

__all__ = ["run"]


def test_vectors_of_texts_and_ids(run) -> None:
    backbone = palm.Backbone.from_pretrained(run)
    embedder = TrainedModel.open(run).embedder()
    found = backbone(TEXTS)
    assert isinstance(found, torch.Tensor) and found.dtype == torch.float32
    assert np.array_equal(found, embedder.embed(TEXTS))
    ids = [each.input_ids for each in embedder.encode(TEXTS[:3])]
    assert torch.equal(backbone([row.tolist() for row in ids]), backbone(TEXTS[:3]))
    padded = torch.zeros(3, 150, dtype=torch.int64) + TOKENIZER.vocabulary.pad
    for row, own in zip(padded, ids, strict=True):
        row[: len(own)] = torch.from_numpy(own)
    assert torch.equal(backbone(padded), backbone(TEXTS[:3]))
    assert torch.equal(backbone("cat"), backbone(["cat"]))
    assert torch.equal(pickle.loads(pickle.dumps(backbone))("cat"), backbone("cat"))
    assert backbone([]).shape == (0, 16)


def test_settings(run) -> None:
    backbone = palm.Backbone.from_pretrained(run)
    wanted = TrainedModel.open(run).embedder(
        EmbeddingSettings(pooling="cls", layers=(1,), normalize=True)
    )
    found = backbone(TEXTS, pooling="cls", layers=1, normalize=True)
    assert np.array_equal(found, wanted.embed(TEXTS))
    tokens = backbone(["cat", "cat sat"], tokens=True)
    assert [tuple(each.shape) for each in tokens] == [(3, 16), (4, 16)]
    with pytest.raises(UserError, match="poling: no such setting; did you mean .pooling."):
        backbone(TEXTS, poling="cls")


def test_all_settings_share_the_weights(run) -> None:
    backbone = palm.Backbone.from_pretrained(run)
    for prompt in ("", "a ", "b "):
        found = backbone(["cat"], prompt=prompt, pooling="cls", task="a")
        wanted = EmbeddingSettings(pooling="cls", task="a")
        assert np.array_equal(
            found, TrainedModel.open(run).embedder(wanted).embed([f"{prompt}cat"])
        )
    opened = backbone._vectors["cpu"].embedders
    assert len(opened) == 3 and len({id(each.encoder) for each in opened.values()}) == 1


def test_any_sequence_of_texts(run) -> None:
    backbone = palm.Backbone.from_pretrained(run)
    series = pandas.Series(["cat", "cat sat"], index=[7, 9])
    for texts in (series, np.array(["cat", "cat sat"]), ("cat", "cat sat"), iter(series)):
        assert torch.equal(backbone(texts), backbone(["cat", "cat sat"]))


def test_what_has_no_vectors(run, tmp_path) -> None:
    backbone = palm.Backbone.from_pretrained(run)
    for wrong in ([[]], [[2, 10**6]], [[-1]], [[5] * 151]):
        with pytest.raises(UserError, match="text 0: expected 1 to 150 ids from 0 to 13"):
            backbone(wrong)
    for wrong in ([2, 5, 3], [[2, 5.5, 3]], [[2, "a"]], [[[2, 3], [2]]], [None]):
        with pytest.raises(UserError, match="text 0: expected 1 to 150 ids from 0 to 13, got"):
            backbone(wrong)
    with pytest.raises(UserError, match="text 1: expected a text like the others, got None"):
        backbone(["cat", None])
    new = palm.Backbone.from_config({"hidden_size": 12}, tokenizer=tmp_path)
    with pytest.raises(UserError, match="has no weights yet"):
        new("cat")
