"""Resized folders open again and compute the same on old texts."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import load_tokenizer, wordpiece
from palm_ds.weights.convert.resize import ResizeOptions, resize_checkpoint
from palm_ds.weights.formats.weights_info import INFO, read_info
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import (
    WeightsInfo,
    export_hf,
    load_weights,
    save_weights,
)
from tests.helpers.reseal import reseal

WORDS = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cov", "##id", "the", "york"]
CONFIG = EncoderConfig(
    vocab_size=12,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    intermediate_size=24,
    max_positions=8,
    task_types=2,
    layer_norm_eps=1e-5,
)
IDS = [3, 8, 9, 6, 7, 4]


def model(config: EncoderConfig = CONFIG, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    backbone = build_encoder(config)
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(16, 3, pooled=True)}
    net = Model(backbone, heads, {name: name for name in heads}).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


@torch.no_grad()
def hidden(net: Model) -> torch.Tensor:
    row = np.array(IDS)
    text = Example(input_ids=row, token_type_ids=row * 0, source_offsets=row, annotations={})
    return net.backbone(collate([[(text, 0)]], length=len(IDS), pad=0))[0]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    info = WeightsInfo(
        backbone=CONFIG,
        task_ids={"words": 1},
        head_of={"words": "words", "order": "order"},
        export_task="words",
    )
    folder, tokenizer = tmp_path / "weights", wordpiece(WORDS, lower=True)
    save_weights(model(), folder, info, tokenizer=tokenizer)
    return folder


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens.txt").write_text("covid\nflu\tthe york\n[ENT]\nyork\n")
    return tmp_path / "tokens.txt"


def test_all_changes_in_one_call(weights: Path, tokens: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in weights.rglob("*") if path.is_file()}
    wanted = ResizeOptions(tokens=tokens, reuse_unused=True, multiple=8, positions=20)
    said = resize_checkpoint(weights, tmp_path / "out", wanted)
    assert said[0] == "tokens: covid 1, flu 10, [ENT] 11; 1 of 4 already known"
    assert said[-1] == f"written to {tmp_path / 'out'}" and len(said) == 5
    info = read_info(tmp_path / "out" / INFO)
    assert (info.backbone.vocab_size, info.backbone.max_positions) == (16, 20)
    assert (info.task_ids, info.export_task) == ({"words": 1}, "words")
    assert info.made_by["edited"] == said[:-1]
    new = model(info.backbone, seed=2)
    assert load_weights(open_model(tmp_path / "out"), new).newly_initialized == ()
    assert torch.equal(hidden(model()), hidden(new))
    table, old = new.backbone.word.weight, model().backbone.word.weight
    torch.testing.assert_close(table[1], (old[6] + old[7]) / 2)
    torch.testing.assert_close(table[10], (old[8] + old[9]) / 2)
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer")
    assert tokenizer.size == 12
    assert [ids.tolist() for ids, _ in tokenizer.encode_texts(["flu covid york"])] == [[10, 1, 9]]
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(os.listdir(tmp_path)) == ["out", "tokens.txt", "weights"]


def test_tokens_come_from_a_pipe(weights: Path, tokens: Path, tmp_path: Path) -> None:
    """As in bash's `--add_tokens <(sort tokens.txt)`; a second reading found nothing."""
    source, end = os.pipe()
    os.write(end, tokens.read_bytes())
    os.close(end)
    wanted = ResizeOptions(tokens=Path(f"/dev/fd/{source}"))
    try:
        resize_checkpoint(weights, tmp_path / "out", wanted)
    finally:
        os.close(source)
    assert load_tokenizer(tmp_path / "out/tokenizer").size == 13


def test_a_hugging_face_folder_becomes_one(tokens: Path, tmp_path: Path) -> None:
    net = model()
    export_hf(net, tmp_path / "hf", config=CONFIG, tokenizer=wordpiece(WORDS, lower=True))
    resize_checkpoint(
        tmp_path / "hf", tmp_path / "out", ResizeOptions(tokens=tokens, multiple=8, positions=16)
    )
    ids = torch.tensor([IDS])
    both = [AutoModelForMaskedLM.from_pretrained(tmp_path / x).eval() for x in ("hf", "out")]
    with torch.no_grad():
        old, new = (x(ids, output_hidden_states=True) for x in both)
    for one, other in zip(old.hidden_states, new.hidden_states, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(old.logits[..., :10], new.logits[..., :10], atol=1e-6, rtol=0)
    assert new.logits.shape[-1] == 16 and both[1].config.max_position_embeddings == 16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("covid flu", add_special_tokens=False)["input_ids"] == [10, 11]


def test_trimming_keeps_every_row_of_the_vocabulary(weights: Path, tmp_path: Path) -> None:
    resize_checkpoint(weights, tmp_path / "out", ResizeOptions(multiple=1))
    table = load_file(tmp_path / "out/weights.safetensors")["backbone.word.weight"]
    assert torch.equal(table, model().backbone.word.weight[:10])
    assert load_tokenizer(tmp_path / "out/tokenizer").size == 10


def test_without_a_tokenizer_all_rows_count_as_used(weights: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    save_weights(model(), bare, read_info(weights / INFO))
    resize_checkpoint(bare, tmp_path / "out", ResizeOptions(multiple=5))
    assert read_info(tmp_path / "out" / INFO).backbone.vocab_size == 15
    assert not (tmp_path / "out/tokenizer").exists()
    resize_checkpoint(
        bare, tmp_path / "two", ResizeOptions(multiple=5, tokenizer=weights / "tokenizer")
    )
    assert read_info(tmp_path / "two" / INFO).backbone.vocab_size == 10


def lost(folder: Path, name: str) -> None:
    state = load_file(folder / "weights.safetensors")
    del state[name]
    save_file(state, folder / "weights.safetensors")


def broken(weights: Path, case: str) -> dict:
    """Damage it; returns the arguments of the command."""
    tokens = weights.parent / "tokens.txt"
    if case == "no tokenizer":
        save_weights(model(), weights, read_info(weights / INFO))
    elif case == "no word table":
        lost(weights, "backbone.word.weight")
    elif case == "no position table":
        lost(weights, "backbone.position.weight")
        return {"positions": 20}
    elif case == "a larger tokenizer":
        wordpiece([*WORDS, "a", "b", "c"], lower=True).save(weights / "tokenizer")
        reseal(weights)
    elif case == "nothing wanted":
        return {}
    elif case == "no such way":
        return {"positions": 20, "how": "copy"}
    elif case == "no tokens":
        tokens.write_text("\n")
    elif case == "tokens in capitals":
        tokens.write_text("COVID\n")
    elif case == "multiple of nothing":
        return {"multiple": 0}
    elif case == "another config":
        about = json.loads((weights / "weights.json").read_text())
        about["backbone"]["vocab_size"] = 13
        (weights / "weights.json").write_text(json.dumps(about))
        reseal(weights)
    return {"tokens": tokens}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no tokenizer", "weights: has no tokenizer to add tokens to"),
        ("no word table", "backbone.word.weight"),
        ("no position table", "backbone.position.weight"),
        ("a larger tokenizer", "has 12 rows, which do not fit a vocabulary of 13"),
        ("nothing wanted", "nothing to do"),
        ("no such way", 'no method "copy"'),
        ("no tokens", "tokens.txt: empty"),
        ("tokens in capitals", "turns it into 'covid'"),
        ("multiple of nothing", "multiple: must be from 1 to"),
        ("another config", "12"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    case: str, words: str, weights: Path, tokens: Path, tmp_path: Path
) -> None:
    wanted = ResizeOptions(**broken(weights, case))
    with pytest.raises(UserError) as caught:
        resize_checkpoint(weights, tmp_path / "out", wanted)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["tokens.txt", "weights"]


def test_an_existing_folder_stays_unchanged(weights: Path, tmp_path: Path) -> None:
    for target in (weights, tmp_path):
        with pytest.raises(UserError, match="already exists"):
            resize_checkpoint(weights, target, ResizeOptions(multiple=8))
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        resize_checkpoint(tmp_path / "nowhere", tmp_path / "out", ResizeOptions(multiple=8))
    assert load_weights(open_model(weights), model(seed=2)).newly_initialized == ()


@pytest.fixture
def command(root: Path) -> ModuleType:
    path = root / "tools/convert_ckpt/edit.py"
    spec = importlib.util.spec_from_file_location("edit_command", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command(
    command: ModuleType,
    weights: Path,
    tokens: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [weights, tmp_path / "out", "--add_tokens", tokens, "--multiple", 64, "--positions", 32]
    monkeypatch.setattr(sys, "argv", ["edit.py", *map(str, [*line, "--how", "interpolate"])])
    assert command.main() == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5 and "now 64, a multiple of 64" in out[2] and "interpolated" in out[3]
    with pytest.raises(SystemExit) as ended:
        command.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("error: ") and "already exists" in said.err
