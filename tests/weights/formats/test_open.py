"""Every format against every way to be malformed: one clear line that names the file or the tensor,
and nothing half made. What only one format can have wrong is in the tests of that format."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.formats.open import FORMATS, open_checkpoint
from palm_ds.weights.formats.paddle.pdparams import read_pickle
from palm_ds.weights.formats.paddle.variable_files import read_folder
from palm_ds.weights.formats.tensorflow.tensor_bundle import open_bundle
from palm_ds.weights.formats.weights_info import INFO, WeightsInfo
from palm_ds.weights.weights_folder import save_weights
from tests.helpers.reseal import reseal
from tests.weights.formats import paddle_made, tensorflow_made
from tests.weights.formats.hf_models import make
from tests.weights.formats.hf_models import save as save_hf
from tests.weights.formats.huggingface.test_read import write_out

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """One that a test spoils: its files, and its tensors by the name that each has in them."""

    weights: Path
    config: Path
    words: str
    norm: str
    matrix: str
    bias: str
    read: Callable[[], State]
    write: Callable[[State], Any]
    settings: str = ""  # the key in the config under which the encoder's numbers are

    def change(self, edit: Callable[[State], object]) -> None:
        state = {name: tensor.clone() for name, tensor in self.read().items()}
        edit(state)
        self.write(state)

    def set(self, **numbers: object) -> None:
        content = json.loads(self.config.read_text())
        inner = content[self.settings] if self.settings else content
        assert inner.keys() >= numbers.keys()
        inner.update(numbers)
        self.config.write_text(json.dumps(content))
        if self.settings:
            reseal(self.config.parent)


HUGGING_FACE = {
    "words": "bert.embeddings.word_embeddings.weight",
    "norm": "bert.embeddings.LayerNorm.weight",
    "matrix": "bert.encoder.layer.1.attention.self.query.weight",
    "bias": "bert.encoder.layer.0.output.dense.bias",
}


@cache
def bert() -> dict[str, bytes]:
    """The files of a folder that transformers wrote."""
    with TemporaryDirectory() as folder:
        saved = save_hf(make("bert", "ForMaskedLM"), Path(folder) / "bert")
        return {file.name: file.read_bytes() for file in saved.iterdir()}


def safetensors(folder: Path) -> Checkpoint:
    folder.mkdir()
    for name, content in bert().items():
        (folder / name).write_bytes(content)
    file = folder / "model.safetensors"
    write = lambda state: save_file(state, file)  # noqa: E731
    config = folder / "config.json"
    return Checkpoint(file, config, **HUGGING_FACE, read=lambda: load_file(file), write=write)


def binary(folder: Path) -> Checkpoint:
    found = safetensors(folder)
    state, file = found.read(), folder / "pytorch_model.bin"
    found.weights.unlink()
    torch.save(state, file)
    read = lambda: torch.load(file, weights_only=True)  # noqa: E731
    write = lambda state: torch.save(state, file)  # noqa: E731
    return Checkpoint(file, found.config, **HUGGING_FACE, read=read, write=write)


def deepspeed(folder: Path) -> Checkpoint:
    found = safetensors(folder)
    state, file = found.read(), folder / "mp_rank_00_model_states.pt"
    found.weights.unlink()
    more = {"shared_params": None, "optimizer": None}
    write = lambda state: torch.save({"module": state, **more}, file)  # noqa: E731
    write(state)
    read = lambda: torch.load(file, weights_only=True)["module"]  # noqa: E731
    return Checkpoint(file, found.config, **HUGGING_FACE, read=read, write=write)


def tensorflow(folder: Path) -> Checkpoint:
    tensorflow_made.checkpoint(folder)
    stem, file = folder / "bert_model.ckpt", folder / "bert_model.ckpt.data-00000-of-00001"
    index = folder / "bert_model.ckpt.index"
    names = {
        "words": "bert/embeddings/word_embeddings",
        "norm": "bert/embeddings/LayerNorm/gamma",
        "matrix": "bert/encoder/layer_1/attention/self/query/kernel",
        "bias": "bert/encoder/layer_0/output/dense/bias",
    }
    read = lambda: {name: x.read() for name, x in open_bundle(index).entries.items()}  # noqa: E731
    write = lambda state: tensorflow_made.write_bundle(stem, state)  # noqa: E731
    return Checkpoint(file, folder / "bert_config.json", **names, read=read, write=write)


def arrays_of(state: State) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in state.items()}


def pdparams(folder: Path) -> Checkpoint:
    arrays = paddle_made.nlp(paddle_made.static(task=False), "bert.")
    config = {**paddle_made.ERNIE, "model_type": "bert", "type_vocab_size": 3}
    made = paddle_made.pickled(folder, arrays, config)
    file = made / "model_state.pdparams"
    names = {
        "words": "bert.embeddings.word_embeddings.weight",
        "norm": "bert.embeddings.layer_norm.weight",
        "matrix": "bert.encoder.layers.1.self_attn.q_proj.weight",
        "bias": "bert.encoder.layers.0.linear2.bias",
    }
    read = lambda: {name: x.read() for name, x in read_pickle(file).tensors.items()}  # noqa: E731
    write = lambda state: file.write_bytes(pickle.dumps(arrays_of(state), 4))  # noqa: E731
    return Checkpoint(file, made / "config.json", **names, read=read, write=write)


def variable_files(folder: Path) -> Checkpoint:
    made = paddle_made.checkpoint(folder, paddle_made.static())
    params = made / "params"
    names = {
        "words": "word_embedding",
        "norm": "pre_encoder_layer_norm_scale",
        "matrix": "encoder_layer_1_multi_head_att_query_fc.w_0",
        "bias": "encoder_layer_0_ffn_fc_1.b_0",
    }

    def write(state: State) -> None:
        for file in params.iterdir():
            file.unlink()
        paddle_made.write_folder(params, arrays_of(state))

    read = lambda: {name: x.read() for name, x in read_folder(params).items()}  # noqa: E731
    file, config = params / "word_embedding", made / "ernie_config.json"
    return Checkpoint(file, config, **names, read=read, write=write)


def native(folder: Path) -> Checkpoint:
    sizes = dict(hidden_size=16, num_layers=2, num_heads=2, max_positions=20, token_types=2)
    config = EncoderConfig(vocab_size=37, intermediate_size=24, **sizes)
    backbone = build_encoder(config)
    net = Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"})
    save_weights(net, folder, WeightsInfo(backbone=config))
    file = folder / "weights.safetensors"
    names = {
        "words": "backbone.word.weight",
        "norm": "backbone.norm.weight",
        "matrix": "backbone.layers.1.qkv.weight",
        "bias": "backbone.layers.0.contract.bias",
    }

    def write(state: State) -> None:
        save_file(state, file)
        reseal(folder)

    read = lambda: load_file(file)  # noqa: E731
    return Checkpoint(file, folder / INFO, **names, read=read, write=write, settings="backbone")


WRITTEN = (safetensors, binary, deepspeed, tensorflow, pdparams, variable_files, native)
Spoils = Callable[[Checkpoint], object]
THEIRS_AND_OURS = {"layers": ("num_hidden_layers", "num_layers")}
THEIRS_AND_OURS |= {"heads": ("num_attention_heads", "num_heads")}
THEIRS_AND_OURS |= {"activation": ("hidden_act", "activation")}


def without(part: str) -> Spoils:
    return lambda found: found.change(lambda state: state.pop(getattr(found, part)))


def replaced(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Spoils:
    def change(found: Checkpoint) -> None:
        name = getattr(found, part)
        found.change(lambda state: state.update({name: make(state[name])}))

    return change


def one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.reshape(-1).index_fill(0, torch.tensor([3]), value).view_as(tensor)


def number(key: str, value: object) -> Spoils:
    theirs, ours = THEIRS_AND_OURS.get(key, (key, key))
    return lambda found: found.set(**{ours if found.settings else theirs: value})


def weights(content: bytes) -> Spoils:
    return lambda found: found.weights.write_bytes(content)


def config(content: bytes) -> Spoils:
    return lambda found: found.config.write_bytes(content)


def half(found: Checkpoint) -> None:
    os.truncate(found.weights, found.weights.stat().st_size // 2)


def twice(found: Checkpoint) -> None:
    found.config.write_text(found.config.read_text().rstrip()[:-1] + ', "a": 1, "a": 2}')


def odd_name(found: Checkpoint) -> None:
    found.change(lambda state: state.update({"w\x1b[2J": torch.zeros(1)}))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
PAGE = b"\n<!DOCTYPE html><p>x"
UNKNOWN = "not a checkpoint of a known format"
NO_JSON = "CONFIG: cannot be read as JSON"
FORMAT = "cut short|not a Paddle variable"  # of files that may hold anything
SHAPE, NOT_FINITE = r"NAME.* (?:has|got) shape", "weight: has values that are not finite"
# What is done to a good checkpoint, and the message: its WEIGHTS and CONFIG, the NAME of a tensor.
MALFORMED: dict[str, tuple[Spoils, str]] = {
    "no words": (without("words"), f"it has no NAME|no .*word_emb|no token embed|{UNKNOWN}"),
    "no norm": (without("norm"), "incomplete, it has no (NAME|backbone.norm.weight) "),
    "no matrix": (without("matrix"), r"incomplete, it has .*no .*layers?.1.*(query|qkv)"),
    "no bias": (without("bias"), "incomplete, it has no (NAME|backbone.layers.0.contract.bias) "),
    "no tensors": (
        lambda found: found.change(dict.clear),
        f"only 0 tensors|no .*word_embeddings|among 0 tensors|{UNKNOWN}",
    ),
    "another shape": (
        replaced("matrix", lambda x: x.new_zeros(len(x) + 1, x.shape[1])),
        rf"{SHAPE} .*\((49, 16|48, 17|17, 16|9, 8)\)",
    ),
    "one dimension": (replaced("matrix", lambda x: x[0].clone()), rf"{SHAPE} .*\(\d+,\)"),
    "a longer vector": (
        replaced("norm", lambda x: x.new_zeros(len(x) + 1)),
        rf"{SHAPE} \((9|17),\), but the configuration expects \((8|16),\)",
    ),
    "a scalar": (replaced("norm", lambda x: torch.tensor(1.0)), rf"{SHAPE} \(\)"),
    "whole numbers": (
        replaced("matrix", lambda x: x.to(torch.int32)),
        "(NAME|query.weight:) is torch.int32[,;] expected floating-point values",
    ),
    "NaN": (replaced("matrix", one(float("nan"))), f"self.query.{NOT_FINITE}"),
    "infinite": (replaced("norm", one(float("inf"))), f"LayerNorm.{NOT_FINITE}"),
    "a command": (odd_name, r"(cannot be shown: |not printable, ')w\\x1b\[2J"),
    "no weights": (
        lambda found: found.weights.unlink(),
        f"neither model.safetensors nor|no .*data-00000-of-|cannot be read as|{UNKNOWN}",
    ),
    "empty": (
        weights(b""),
        f"WEIGHTS: (is empty|cannot be read|not a pickle|ends inside|{FORMAT})",
    ),
    "cut short": (half, "WEIGHTS: .*(cannot be read as|cut short|ends inside)"),
    "a pointer": (weights(POINTER), f"WEIGHTS: (is a Git LFS pointer, not the file .*|{FORMAT})"),
    "a page": (weights(PAGE), f"WEIGHTS: (is an HTML page|{FORMAT})"),
    "no config": (lambda found: found.config.unlink(), f"CONFIG|ernie_config.json|{UNKNOWN}"),
    "config empty": (config(b""), NO_JSON),
    "config cut short": (config(b"{"), NO_JSON),
    "config too deep": (config(b"[" * 100_000), NO_JSON),
    "config no text": (config(b"\xff{}"), NO_JSON),
    "config a list": (config(b"[]"), "CONFIG: expected keys and values, got list"),
    "config a page": (config(PAGE), "CONFIG: is an HTML page"),
    "a key twice": (twice, 'CONFIG: duplicate key "a"'),
    "another width": (
        number("hidden_size", 32),
        rf"{SHAPE} \((37, 16|11, 8)\), but the configuration expects \((37|11), 32\)",
    ),
    "no number": (
        number("hidden_size", "eight"),
        'CONFIG: .*hidden_size: expected .*, got "eight"',
    ),
    "more layers": (
        number("layers", 3),
        "incomplete, it has no .*layers?.2.|CONFIG: num_hidden_layers is 3, but the tensors have 2",
    ),
    "900 layers": (
        number("layers", 900),
        "900 layers, but there are only|CONFIG: num_hidden_layers is 900, but the tensors have 2",
    ),
    "layers without end": (
        number("layers", 10**12),
        "CONFIG: num_hidden_layers: expected a whole number from 1 to 1,000|1000000000000 layers",
    ),
    "another vocabulary": (
        number("vocab_size", 36),
        rf"{SHAPE} \(37, 16\), .* \(36, 16\)|CONFIG: vocab_size is 36, .* have 11",
    ),
    "heads": (number("heads", 3), "CONFIG: .*num_heads: 3 does not divide the hidden_size (16|8)"),
    "activation": (
        number("activation", "maxout"),
        'CONFIG: .*activation: no "maxout"; known: gelu',
    ),
}


@pytest.mark.parametrize("write", WRITTEN, ids=lambda write: write.__name__)
@pytest.mark.parametrize("case", MALFORMED)
def test_one_line_and_nothing_half_made(case: str, write: Any, tmp_path: Path) -> None:
    found = write(tmp_path / "made")
    spoil, message = MALFORMED[case]
    spoil(found)
    before = sorted(tmp_path.rglob("*"))
    names = {"WEIGHTS": [found.weights.name], "CONFIG": [found.config.name]}
    names["NAME"] = [found.words, found.norm, found.matrix, found.bias]
    for key, values in names.items():
        message = message.replace(key, f"({'|'.join(map(re.escape, values))})")
    with pytest.raises(UserError, match=message) as caught:
        write_out(open_checkpoint(found.config.parent), tmp_path / "out")
    assert str(caught.value).isprintable()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("write", WRITTEN, ids=lambda write: write.__name__)
def test_they_are_good_before(write: Any, tmp_path: Path) -> None:
    found = write(tmp_path / "made")
    found.change(dict.copy)
    found.set(**{"hidden_size": open_checkpoint(found.config.parent).config.hidden_size})
    assert open_checkpoint(found.config.parent).config.num_layers == 2
    write_out(open_checkpoint(found.config.parent), tmp_path / "out")


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": b"[" * 100_000, "model.safetensors": b"", "long.index": bytes(100)},
        {"model.safetensors": b"\xff" * 100, "model.safetensors.index.json": b"{", "x.index": b""},
        {"config.json": b"\x00", "latest": b"\xff\xfe", "a.safetensors": b"no", "a.index": b"text"},
        {"model_state.pdparams/x": b"", "step_1/x": b""},
    ],
)
def test_strange_files_are_recognized_by_no_format(files: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for path in (tmp_path, *tmp_path.iterdir(), tmp_path / "none", Path("/dev/null")):
        assert [known.name for known in FORMATS if known.recognizes(path)] == []


BERT = {"model_type": "bert", "hidden_size": 12}
TEXT_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "bert-base-cased\x1b[2J"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": BERT, "tf_model.h5": ""}, r"Keras weights \(tf_model.h5\), a format"),
        ({"config.json": BERT, "flax_model.msgpack": ""}, "has Flax weights"),
        (
            {"model.onnx": ""},
            r"an ONNX program \(model.onnx\), a format that is not read",
        ),
        (
            {"config.json": BERT, "epoch=3.ckpt": ""},
            r"a training checkpoint \(epoch=3.ckpt\); save",
        ),
        (
            {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""},
            r"a PEFT adapter of bert-base-cased\\x1b\[2J, not a model; merge it",
        ),
        ({"adapter_config.json": {}, "config.json": BERT}, "a PEFT adapter, not a model"),
        (
            {"model_state.pdparams": TEXT_POINTER, "model_config.json": {}},
            "is a Git LFS pointer",
        ),
        (
            {"bert_model.ckpt.index": TEXT_POINTER, "bert_config.json": BERT},
            "is a Git LFS pointer",
        ),
        ({"config.json": BERT, "pytorch_model.bin": TEXT_POINTER}, "is a Git LFS pointer"),
        (
            {"config.json": BERT, "model.fp16.safetensors": ""},
            r"only the variant fp16 of its weights .* rename a single file to model.safetensors",
        ),
        (
            {"config.json": BERT, "pytorch_model.bf16.bin": ""},
            r"only the variant bf16 of its weights .* rename a single file to pytorch_model.bin",
        ),
        ({"__0_0.distcp": "", ".metadata": ""}, "distributed.checkpoint .*dcp_to_torch FOLDER"),
        ({"config.json": BERT, "onnx/model.onnx": ""}, r"an ONNX program \(onnx/model.onnx\)"),
        (
            {"mine/config.json": BERT, "mine/model.safetensors": "", "notes/a.txt": ""},
            r"not a checkpoint of a known format; did you mean .*mine\"",
        ),
        ({"mine/weights/weights.json": {}}, r"a known format; did you mean .*mine\"\?"),
        (
            {"manifest.json": {}, "dataset_info.json": {}},
            "a corpus, not a model; `palm-ds corpus inspect` shows it",
        ),
        ({"config.json": BERT}, "neither model.safetensors nor pytorch_model.bin"),
    ],
)
def test_a_folder_of_another_library(files: dict, message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content) if isinstance(content, dict) else content)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bert.h5", b"\x89HDF\r\n\x1a\n", "is a Keras file"),
        ("model.bin", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("model.bin", b"<html>", "is an HTML page"),
        ("model.gguf", b"GGUF", "has GGUF weights"),
        ("model.bin", b"?", "not a checkpoint of a known format"),
    ],
)
def test_a_file_of_another_library(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path / name)
