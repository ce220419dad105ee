"""Weights of ERNIE-Doc, of Baidu's static graph and of PaddleNLP: the outputs, memories and losses
that these programs gave, step after step, and the same tensors after a way through our formats."""

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
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.encoder.kinds.ernie_doc import distance_rows
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch, SegmentMemory
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.formats.runnable import load_encoder

STATIC, PADDLENLP = "ernie_doc", "paddlenlp_ernie_doc"
EACH = pytest.mark.parametrize("name", [STATIC, PADDLENLP])
LENGTH, MEMORY = 12, 6
OPTIONS = {
    STATIC: {"memory_length": MEMORY},
    PADDLENLP: {"memory_length": MEMORY, "masked_score": 1e8},
}
TOLERANCE = 2e-5


def batch_of(step: dict[str, np.ndarray], past: torch.Tensor | None) -> Batch:
    ids = torch.from_numpy(step["in_src_ids"]).long().squeeze(-1)
    real = torch.from_numpy(step["in_input_mask"]).squeeze(-1) > 0
    zeros = torch.zeros_like(ids)
    return Batch(
        input_ids=ids,
        position_ids=zeros,
        token_type_ids=zeros,
        task_ids=zeros,
        sequence_ids=torch.where(real, 0, -1),
        cu_seqlens=torch.arange(len(ids) + 1) * LENGTH,
        memory=SegmentMemory(past),
    )


def steps_of(folder: Path) -> list[dict[str, np.ndarray]]:
    arrays = np.load(folder / "io.npz")
    numbers = sorted({int(key[4 : key.index("_")]) for key in arrays})
    return [
        {
            key.removeprefix(f"step{number}_"): arrays[key]
            for key in arrays
            if key.startswith(f"step{number}_")
        }
        for number in numbers
    ]


def largest_difference(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.detach().numpy() - expected).max())


def classifier(contents: CheckpointContents, head: str, pooled: torch.Tensor) -> torch.Tensor:
    weight, bias = (contents.entries[f"heads.{head}.out.{x}"].read() for x in ("weight", "bias"))
    return F.linear(pooled, weight, bias)


@EACH
def test_outputs_and_memories_are_those_of_the_program_that_wrote_it(
    name: str, shared: Path
) -> None:
    """The last steps have a short window, padded before its last token, and a new document with
    the old one's memory."""
    contents = open_checkpoint(shared / "oracle" / name)
    config = contents.config
    assert (config.kind, config.options) == ("ernie_doc", OPTIONS[name])
    assert (config.max_positions, config.token_types, config.task_types) == (LENGTH, 3, 0)
    encoder, past = load_encoder(contents), None
    for step in steps_of(shared / "oracle" / name):
        batch = batch_of(step, past)
        with torch.no_grad():
            found = encoder(batch)
            pooled = encoder.pooler(found[:, -1])
        assert batch.memory is not None and batch.memory.following is not None
        past = batch.memory.following
        real = batch.sequence_ids >= 0
        expected = step["out_sequence_output"][real.numpy()]
        assert largest_difference(found[real], expected) < TOLERANCE
        theirs = step.get("out_pooled_output", step.get("out_pooled"))
        assert theirs is not None and largest_difference(pooled, theirs) < TOLERANCE
        logits = step.get("out_cls_logits", step.get("out_logits"))
        assert logits is not None
        scores = classifier(contents, "classifier", pooled)
        assert largest_difference(scores, logits) < TOLERANCE
        for number in range(config.num_layers):
            assert largest_difference(past[number], step[f"out_memory_{number}"]) < TOLERANCE
        if name == STATIC:
            loss = pretraining_loss(contents, encoder, found, step)
            assert abs(loss - float(step["out_pretrain_loss"][0])) < TOLERANCE


@torch.no_grad()
def pretraining_loss(
    contents: CheckpointContents, encoder: Encoder, found: torch.Tensor, step: dict[str, np.ndarray]
) -> float:
    """Masked words and the order of segments, each on average."""
    head = MaskedLMHead(encoder)
    prefix = "heads.masked_words."
    state = {
        key.removeprefix(prefix): entry.read()
        for key, entry in contents.entries.items()
        if key.startswith(prefix)
    }
    head.load_state_dict(state, strict=False)
    labels = torch.from_numpy(step["in_mask_label"]).long().squeeze(-1)
    positions = torch.from_numpy(step["in_mask_pos"]).long().squeeze(-1)
    words = head(found.flatten(0, 1)[positions], labels)[0] / len(labels)
    assert abs(float(words) - float(step["out_mlm_loss"][0])) < TOLERANCE
    rows = torch.from_numpy(step["in_reorder_idx"]).long().squeeze(-1)
    scores = classifier(contents, "multi_sent_sorted", encoder.pooler(found[rows, -1]))
    orders = torch.from_numpy(step["in_reorder_label"]).long().squeeze(-1)
    return float(words + F.cross_entropy(scores, orders))


def test_the_table_row_of_every_pair(shared: Path) -> None:
    """As ERNIE's reader makes them, and restated for each query and key."""
    step = steps_of(shared / "oracle" / STATIC)[0]
    rows = distance_rows(LENGTH, MEMORY, LENGTH)
    theirs = step["in_pos_ids"][0, :, 0]
    for i in range(LENGTH):
        for j in range(MEMORY + LENGTH):
            d = MEMORY + i - j
            row = LENGTH + d - 1 if d >= 1 else -d
            assert rows[LENGTH - 1 - i + j] == row
            assert theirs[LENGTH - i + j] == row


def tensors(contents: CheckpointContents) -> dict[str, torch.Tensor]:
    return {name: entry.read() for name, entry in contents.entries.items()}


@EACH
def test_there_and_back_without_loss(name: str, shared: Path, tmp_path: Path) -> None:
    """PaddleNLP has no class with the heads of pretraining; it gets its own files back."""
    source = open_checkpoint(shared / "oracle" / name)
    options = ConversionOptions(strict=True, verify=False)
    convert(source.path, tmp_path / "ours", "palm_ds", options)
    ours = open_checkpoint(tmp_path / "ours")
    assert ours.config == source.config and not source.skipped
    before = tensors(source)
    assert before.keys() == tensors(ours).keys()
    assert all(torch.equal(x, before[key]) for key, x in tensors(ours).items())
    with pytest.raises(
        UserError, match=r"huggingface has no ernie_doc encoder; .* palm_ds or paddle"
    ):
        convert(tmp_path / "ours", tmp_path / "no", "huggingface", options)
    convert(tmp_path / "ours", tmp_path / "theirs", "paddle", ConversionOptions(verify=False))
    theirs = open_checkpoint(tmp_path / "theirs")
    assert theirs.config == replace(source.config, options=OPTIONS[PADDLENLP])
    assert all(torch.equal(x, before[key]) for key, x in tensors(theirs).items())
    if name == PADDLENLP:
        back = pickle.loads((tmp_path / "theirs/model_state.pdparams").read_bytes())
        original = dict(np.load(source.path / "weights.npz"))
        assert original.keys() == back.keys() - {"StructuredToParameterName@@"}
        for key, values in original.items():
            np.testing.assert_array_equal(values, back[key])
        config = json.loads((tmp_path / "theirs/config.json").read_text())
        their_config = json.loads((source.path / "config.json").read_text())
        assert {key: config.get(key) for key in their_config if "label" not in key} == {
            key: value for key, value in their_config.items() if "label" not in key
        }


def test_a_memory_that_does_not_fit_is_an_error(shared: Path, tmp_path: Path) -> None:
    source = shared / "oracle" / PADDLENLP
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model_state.pdparams").write_bytes((source / "model_state.pdparams").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "memory_len": 7}))
    with pytest.raises(UserError, match="memory_len: 7 does not fit 30 rows of positions"):
        open_checkpoint(tmp_path)


def test_programs_for_packed_texts_refuse_it(shared: Path) -> None:
    opened = TrainedModel.open(shared / "oracle" / STATIC)
    for use in (opened.embedder, opened.filler, opened.words):
        with pytest.raises(UserError, match="reads documents window by window, .* embed, serve"):
            use()


def test_show_says_what_it_is(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(shared / "oracle" / STATIC)]) == 0
    text = capsys.readouterr().out
    assert "ERNIE, ERNIE-Doc" in text and "multi_sent_sorted" in text and "memory_length" in text
