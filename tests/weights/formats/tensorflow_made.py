"""TensorFlow's bundles for tests, in TensorFlow's exact bytes, and a BERT in one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from palm_ds.weights.formats.tensorflow.tensor_bundle import masked_crc
from tests.weights.formats.hf_models import WORDS, make

DTYPES = {
    torch.float32: 1,
    torch.float64: 2,
    torch.int32: 3,
    torch.int64: 9,
    torch.bfloat16: 14,
    torch.float16: 19,
}
CONFIG = dict(
    vocab_size=WORDS,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=20,
    type_vocab_size=2,
    hidden_act="gelu",
    pooler_type="first_token_transform",
    directionality="bidi",
)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def piece(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def bundle_entry(tensor: torch.Tensor, shard: int, offset: int, data: bytes) -> bytes:
    shape = b"".join(piece(2, number(1, size)) for size in tensor.shape)
    place = number(3, shard) + number(4, offset) + number(5, len(data))
    checksum = varint(6 << 3 | 5) + masked_crc(data).to_bytes(4, "little")
    return number(1, DTYPES[tensor.dtype]) + piece(2, shape) + place + checksum


def block_of(entries: list[tuple[bytes, bytes]], every: int = 16) -> bytes:
    out, restarts, before = b"", [], b""
    for i, (key, value) in enumerate(entries):
        shared = 0
        if i % every == 0:
            restarts.append(len(out))
        else:
            shared = len(os.path.commonprefix([before, key]))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value))
        out, before = out + key[shared:] + value, key
    restarts = restarts or [0]
    return out + b"".join(x.to_bytes(4, "little") for x in [*restarts, len(restarts)])


def table_of(entries: list[tuple[bytes, bytes]], *, per_block: int = 10, way: int = 0) -> bytes:
    out, index = b"", []

    def add(block: bytes) -> bytes:
        nonlocal out
        handle = varint(len(out)) + varint(len(block))
        block += bytes([way])
        out += block + masked_crc(block).to_bytes(4, "little")
        return handle

    for i in range(0, len(entries), per_block):
        part = entries[i : i + per_block]
        index.append((part[-1][0], add(block_of(part))))
    meta = add(block_of([]))
    handles = meta + add(block_of(index, every=1))
    return out + handles.ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little")


def write_bundle(
    stem: Path, tensors: Mapping[str, torch.Tensor], *, shards: int = 1, **options: int
) -> None:
    files = [b""] * shards
    entries = {b"": number(1, shards) + piece(3, number(1, 1))}
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        shard = i % shards
        entries[name.encode()] = bundle_entry(tensor, shard, len(files[shard]), data)
        files[shard] += data
    stem.with_name(stem.name + ".index").write_bytes(table_of(sorted(entries.items()), **options))
    for i, data in enumerate(files):
        stem.with_name(f"{stem.name}.data-{i:05d}-of-{shards:05d}").write_bytes(data)


def google_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state_dict of transformers under the names of BERT's code."""
    named = {}
    for name, value in state.items():
        if ".decoder." in name or name.startswith("cls.predictions.bias"):
            continue
        end = name.rpartition(".")[2]
        theirs = name.replace("layer.", "layer_").replace(".", "/").rpartition("/")[0]
        if "LayerNorm" in name:
            theirs += "/gamma" if end == "weight" else "/beta"
        elif "seq_relationship" in name:
            theirs += "/output_weights" if end == "weight" else "/output_bias"
        elif "_embeddings" not in name:
            theirs += "/kernel" if end == "weight" else "/bias"
        named[theirs] = value.T if theirs.endswith("kernel") else value
    named["cls/predictions/output_bias"] = state["cls.predictions.bias"]
    return {name: value.detach().contiguous() for name, value in named.items()}


def checkpoint(folder: Path, **options: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    folder.mkdir()
    hf = make("bert", "ForPreTraining", layer_norm_eps=1e-12)
    tensors = google_names(hf.state_dict())
    extra = {
        "bert/pooler/dense/kernel/adam_m": torch.zeros(16, 16),
        "bert/pooler/dense/kernel/adam_v": torch.zeros(16, 16),
        "global_step": torch.tensor([7]).squeeze(),
    }
    write_bundle(folder / "bert_model.ckpt", {**tensors, **extra}, **options)
    (folder / "bert_config.json").write_text(json.dumps(CONFIG))
    return hf, tensors
