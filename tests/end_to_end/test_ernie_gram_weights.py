"""Weights of ERNIE-Gram of both eras and of PaddleNLP: the outputs that Baidu's own programs gave,
and the same tensors after a way through our formats."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.positions import gram_buckets
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.formats.runnable import load_encoder

STATIC, DYGRAPH, PADDLENLP = "ernie_gram_static", "ernie_gram_dygraph", "paddlenlp_ernie_gram"
EACH = pytest.mark.parametrize("name", [STATIC, DYGRAPH, PADDLENLP])
OPTIONS = {
    STATIC: {"token_types": "kept"},
    DYGRAPH: {},
    PADDLENLP: {"relative_positions": "kept"},
}
SIZE = {STATIC: 40, DYGRAPH: 40, PADDLENLP: 14}


def texts_of(name: str, shared: Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs and outputs, and which tokens are no padding: those that dygraph is given all are."""
    arrays = dict(np.load(shared / "oracle" / name / "io.npz"))
    ids = arrays["in_src_ids"].reshape(-1, SIZE[name])
    mask = arrays.get("in_input_mask", ids != 0).reshape(ids.shape) > 0
    return arrays | {"ids": ids, "segments": arrays["in_sent_ids"].reshape(ids.shape)}, mask


def packed(arrays: dict[str, np.ndarray], mask: np.ndarray) -> Batch:
    """All texts in one row."""
    texts = [
        PackedText(input_ids=ids[real], token_type_ids=segments[real])
        for ids, segments, real in zip(arrays["ids"], arrays["segments"], mask, strict=True)
    ]
    return Batch.from_rows([texts], length=int(mask.sum()) + 3, pad=0)


@EACH
def test_outputs_are_those_of_the_program_that_wrote_it(name: str, shared: Path) -> None:
    """In one packed row, where places begin anew at each text."""
    contents = open_checkpoint(shared / "oracle" / name)
    assert (contents.config.kind, contents.config.options) == ("ernie_gram", OPTIONS[name])
    arrays, mask = texts_of(name, shared)
    encoder = load_encoder(contents)
    with torch.no_grad():
        found = encoder(packed(arrays, mask))[0, : mask.sum()]
        first = np.concatenate([[0], np.cumsum(mask.sum(1))[:-1]])
        pooled = encoder.pooler(found[first])
    expected = arrays["out_sequence_output"][mask]
    assert np.abs(found.numpy() - expected).max() < 2e-5
    theirs = arrays.get("out_pooled_output", arrays.get("out_pooled"))
    assert theirs is not None and np.abs(pooled.numpy() - theirs).max() < 2e-5
    if "out_logits" in arrays:
        weight, bias = (contents.entries[f"heads.classifier.out.{x}"] for x in ("weight", "bias"))
        logits = F.linear(pooled, weight.read(), bias.read())
        assert np.abs(logits.numpy() - arrays["out_logits"]).max() < 2e-5


def test_the_table_row_of_every_pair(shared: Path) -> None:
    """As ERNIE's reader makes them, and restated from its rule."""
    expected = np.load(shared / "oracle" / STATIC / "io.npz")["rel_pos_ids_200"]
    found = gram_buckets(torch.arange(200)[None])[0].numpy()
    np.testing.assert_array_equal(found, expected)
    for i in (0, 1, 5, 150):
        for j in (0, 1, 2, 9, 160, 199):
            size = abs(i - j)
            row = size if size < 8 else min(15, 8 + int(np.log(size / 8) / np.log(128 / 8) * 8))
            row = row + 16 if j < i else row
            assert found[i, j] == (16 if i == 0 else 32 if j == 0 else row), (i, j)


def tensors(contents: CheckpointContents) -> dict[str, torch.Tensor]:
    return {name: entry.read() for name, entry in contents.entries.items()}


@EACH
def test_there_and_back_without_loss(name: str, shared: Path, tmp_path: Path) -> None:
    """Weights of palm_ds have every tensor. PaddleNLP gets its own back; what it would compute
    differently is written there if that is asked for."""
    source = open_checkpoint(shared / "oracle" / name)
    options = ConversionOptions(strict=True, verify=False)
    convert(source.path, tmp_path / "ours", "palm_ds", options)
    ours = open_checkpoint(tmp_path / "ours")
    assert ours.config == source.config and not source.skipped
    if name != PADDLENLP:
        with pytest.raises(UserError, match="never relative positions, but this encoder has"):
            convert(tmp_path / "ours", tmp_path / "no", "paddle", options)
        options = replace(options, family="ernie_gram")
    with pytest.raises(
        UserError, match=r"huggingface has no ernie_gram encoder; .* palm_ds or paddle"
    ):
        convert(tmp_path / "ours", tmp_path / "no", "huggingface", options)
    convert(tmp_path / "ours", tmp_path / "theirs", "paddle", options)
    theirs = open_checkpoint(tmp_path / "theirs")
    assert theirs.config.options == OPTIONS[PADDLENLP]
    before = tensors(source)
    for after in (tensors(ours), tensors(theirs)):
        assert before.keys() == after.keys()
        assert all(torch.equal(x, after[key]) for key, x in before.items())
    if name == PADDLENLP:
        path = tmp_path / "theirs/model_state.pdparams"
        back = pickle.loads(path.read_bytes())
        original = dict(np.load(source.path / "weights.npz"))
        assert original.keys() == back.keys() - {"StructuredToParameterName@@"}
        for key, values in original.items():
            np.testing.assert_array_equal(values, back[key])


def test_without_the_table_it_is_a_bert(shared: Path, tmp_path: Path) -> None:
    """As the Chinese release is; a config that promises the table is an error."""
    arrays = dict(np.load(shared / "oracle" / PADDLENLP / "weights.npz"))
    del arrays["ernie_gram.embeddings.rel_pos_embeddings.weight"]
    config = json.loads((shared / "oracle" / PADDLENLP / "config.json").read_text())
    (tmp_path / "model_state.pdparams").write_bytes(pickle.dumps(arrays, 4))
    for size, message in ((None, ""), (33, "the tensors have 0 relative positions")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "rel_pos_size": size}))
        if message:
            with pytest.raises(UserError, match=message):
                open_checkpoint(tmp_path)
            continue
        contents = open_checkpoint(tmp_path)
        assert contents.config.kind == "bert" and contents.config.layer_norm_eps == 1e-5
        assert "no relative positions: the encoder is a Bert" in contents.notes


def test_show_says_what_it_is(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(shared / "oracle" / STATIC)]) == 0
    text = capsys.readouterr().out
    assert "ERNIE, ERNIE-Gram" in text and "rel_pos_embedding" in text
    assert "token types are not added, as in ERNIE outside reading comprehension" in text


def test_tables_that_nothing_reads_are_not_trained() -> None:
    options = {"relative_positions": "kept", "token_types": "kept"}
    values = {"kind": "ernie_gram", "preset": "tiny", "vocab_size": 9, "task_types": 0}
    encoder = build_encoder(EncoderConfig.from_dict({**values, "options": options}))
    frozen = [name for name, x in encoder.named_parameters() if not x.requires_grad]
    assert frozen == ["segment.weight", "relative_bias.weight"]
    assert not encoder.adds_to_scores(encoder.config)
    assert not encoder.has_token_types(encoder.config)
