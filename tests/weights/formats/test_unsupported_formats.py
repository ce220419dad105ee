"""Models of other libraries: one line that names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.open import open_checkpoint

BERT = {"model_type": "bert", "hidden_size": 12}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
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
        ({"model_state.pdparams": POINTER, "model_config.json": {}}, "is a Git LFS pointer"),
        ({"bert_model.ckpt.index": POINTER, "bert_config.json": BERT}, "is a Git LFS pointer"),
        ({"config.json": BERT, "pytorch_model.bin": POINTER}, "is a Git LFS pointer"),
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
