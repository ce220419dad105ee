"""TensorFlow's BERT checkpoints without TensorFlow: real, made here, and broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError
from palm_ds.weights.formats.contents import OPTIMIZER, CheckpointContents
from palm_ds.weights.formats.huggingface.plan import plan
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.huggingface.write import write
from palm_ds.weights.formats.tensorflow.read import open_contents, recognises
from palm_ds.weights.formats.tensorflow.tensor_bundle import crc32c, masked_crc, open_bundle
from tests.weights.formats.hf_models import (
    WORDS,
    build,
    inputs_of,
    make,
    outputs,
    run,
)
from tests.weights.formats.huggingface.test_read import compare_with_recorded

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


# ---- a checkpoint, made here ----


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


# ---- reading ----


@pytest.mark.parametrize("size", [0, 1, 8, 4095, 4096, 4097, 8192, 100_001])
def test_the_checksum_is_castagnoli_s(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF
    assert crc32c(b"123456789") == 0xE3069283  # the check value of its definition


@pytest.mark.parametrize("options", [{}, {"shards": 3}, {"per_block": 1}, {"per_block": 1000}])
def test_a_checkpoint_gives_the_outputs_of_the_original_model(
    options: dict, tmp_path: Path
) -> None:
    hf, _ = checkpoint(tmp_path / "bert", **options)
    for path in ("bert", "bert/bert_model.ckpt", "bert/bert_model.ckpt.index"):
        assert recognises(tmp_path / path)
        contents = open_contents(tmp_path / path)
    assert contents.skipped == {
        "bert/pooler/dense/kernel/adam_m": OPTIMIZER,
        "bert/pooler/dense/kernel/adam_v": OPTIMIZER,
        "global_step": OPTIMIZER,
    }
    assert contents.config.layer_norm_eps == 1e-12 and any("eps" in note for note in contents.notes)
    inputs = inputs_of("bert")
    ours = outputs(build(contents), inputs["input_ids"], inputs["token_type_ids"])
    theirs = run(hf, inputs)
    close = dict(atol=1e-5, rtol=0)
    torch.testing.assert_close(ours["masked_words"], theirs["prediction_logits"], **close)
    torch.testing.assert_close(ours["next_sentence"], theirs["seq_relationship_logits"], **close)


def test_from_tensorflow_to_hugging_face(tmp_path: Path) -> None:
    hf, _ = checkpoint(tmp_path / "bert")
    contents = open_contents(tmp_path / "bert")
    planned = plan(contents.entries, contents.config, contents.heads, ExportOptions())
    write_folder_atomically(tmp_path / "hf", lambda part: write(planned, part))
    again = type(hf).from_pretrained(tmp_path / "hf")  # type: ignore[attr-defined]
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in hf.state_dict().items())


def test_a_given_eps_overrides_the_default(tmp_path: Path) -> None:
    checkpoint(tmp_path / "bert")
    contents = open_contents(tmp_path / "bert", eps=1e-5)
    assert contents.config.layer_norm_eps == 1e-5 and not contents.notes


def test_heads_of_fine_tuning(tmp_path: Path) -> None:
    _, tensors = checkpoint(tmp_path / "bert")
    tensors = {name: x for name, x in tensors.items() if not name.startswith("cls/")}
    heads = {
        "output_weights": torch.randn(3, 16),
        "output_bias": torch.randn(3),
        "cls/squad/output_weights": torch.randn(2, 16),
        "cls/squad/output_bias": torch.randn(2),
        "somewhere/else": torch.zeros(2),
    }
    write_bundle(tmp_path / "bert/bert_model.ckpt", {**tensors, **heads})
    contents = open_contents(tmp_path / "bert")
    found = {name: (head.classes, head.pooled) for name, head in contents.heads.items()}
    assert found == {"classifier": (3, True), "qa_outputs": (2, False)}
    read = contents.entries["heads.classifier.out.weight"].read()
    assert torch.equal(read, heads["output_weights"])
    assert list(contents.skipped) == ["somewhere/else"]


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_types(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(12).reshape(3, 4).to(dtype), "empty": torch.zeros(0, 3).to(dtype)}
    write_bundle(tmp_path / "x", tensors)
    found = open_bundle(tmp_path / "x.index")
    for name, tensor in tensors.items():
        read = found.entries[name].read()
        assert read.dtype == dtype and torch.equal(read, tensor)


def test_non_numeric_tensors_are_skipped_and_named(tmp_path: Path) -> None:
    stem = tmp_path / "x"
    write_bundle(stem, {"a": torch.zeros(2)})
    text = number(1, 7) + piece(2, b"") + number(5, 4)
    entries = {b"": number(1, 1), b"_CHECKPOINTABLE_OBJECT_GRAPH": text}
    (tmp_path / "x.index").write_bytes(table_of(sorted(entries.items())))
    assert open_bundle(tmp_path / "x.index").skipped == {
        "_CHECKPOINTABLE_OBJECT_GRAPH": "not a numeric tensor"
    }


def test_recorded_outputs(shared: Path) -> None:
    folder = shared / "oracle/tf_bert"
    contents = open_contents(folder)
    weights = np.load(folder / "weights.npz")
    for entry in contents.entries.values():
        parts = [weights[x].T if x.endswith("kernel") else weights[x] for x in entry.source_names]
        assert torch.equal(entry.read(), torch.tensor(np.concatenate(parts)))
    used = {name for entry in contents.entries.values() for name in entry.source_names}
    assert used == set(weights) and all(why == OPTIMIZER for why in contents.skipped.values())
    compare_with_recorded(build(contents), folder)


# ---- what is wrong ----


INDEX, DATA = "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"


def flip(file: str, at: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[at] ^= 1
        (folder / file).write_bytes(data)

    return change


def cut(file: str, by: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - by)


def config(**changes: object) -> Callable[[Path], object]:
    return lambda f: (f / "bert_config.json").write_text(json.dumps({**CONFIG, **changes}))


def entries(*said: tuple[bytes, bytes], way: int = 0) -> Callable[[Path], object]:
    """Replaces the index by one with these entries."""
    header = (b"", number(1, 1))
    return lambda f: (f / INDEX).write_bytes(table_of([header, *said], way=way))


def without(name: str, **more: torch.Tensor) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = open_bundle(folder / INDEX).entries
        tensors = {x: entry.read() for x, entry in found.items() if x != name}
        write_bundle(folder / "bert_model.ckpt", {**tensors, **more})

    return change


FLOAT = number(1, 1)
KEY = "bert/encoder/layer_1/attention/self/key/kernel"
BROKEN = {
    "no index": (lambda f: (f / INDEX).unlink(), ["not a TensorFlow checkpoint"]),
    "no data": (lambda f: (f / DATA).unlink(), [INDEX, "data-00000-of-*"]),
    "no config": (lambda f: (f / "bert_config.json").unlink(), ["bert_config.json"]),
    "config not json": (lambda f: (f / "bert_config.json").write_text("{"), ["JSON"]),
    "two checkpoints": (lambda f: (f / "b.ckpt.index").write_text(""), ["several", "bert_model"]),
    "index empty": (lambda f: os.truncate(f / INDEX, 0), [INDEX]),
    "index cut short": (cut(INDEX, 9), [INDEX, "cut short"]),
    "index without its end": (lambda f: os.truncate(f / INDEX, 47), [INDEX, "cut short"]),
    "a block damaged": (flip(INDEX, 3), [INDEX, "checksum"]),
    "the footer damaged": (flip(INDEX, -45), [INDEX]),
    "snappy": (entries(way=1), [INDEX, "snappy"]),
    "another compression": (entries(way=4), [INDEX, "method 4"]),
    "data cut short": (cut(DATA, 5), [DATA, "cut short"]),
    "data damaged": (flip(DATA, 20), [DATA, "damaged", "checksum"]),
    "no header": (
        lambda f: (f / INDEX).write_bytes(table_of([(b"a", FLOAT)])),
        [INDEX, "header"],
    ),
    "big-endian": (
        lambda f: (f / INDEX).write_bytes(table_of([(b"", number(1, 1) + number(2, 1))])),
        [INDEX, "big-endian"],
    ),
    "slices": (entries((b"a", FLOAT + piece(7, b""))), [INDEX, "a is stored in slices"]),
    "a shape of minus one": (
        entries((b"a", FLOAT + piece(2, piece(2, number(1, (1 << 64) - 1))))),
        [INDEX, "a has an impossible shape"],
    ),
    "a shape too large": (
        entries((b"a", FLOAT + piece(2, piece(2, number(1, 1 << 40))) + number(5, 4))),
        [INDEX, "a (1099511627776,) has 4 bytes"],
    ),
    "beyond the data": (
        entries((b"a", FLOAT + number(4, 1 << 60) + number(5, 4))),
        [DATA, "a ends beyond"],
    ),
    "the same data for many": (
        entries(
            *(
                (f"a{i:03}".encode(), FLOAT + piece(2, piece(2, number(1, 100))) + number(5, 400))
                for i in range(999)
            )
        ),
        [INDEX, "used again and again"],
    ),
    "half a message": (entries((b"a", FLOAT + varint(2 << 3 | 2) + b"\x7f")), [INDEX]),
    "a number without end": (entries((b"a", b"\xff" * 12)), [INDEX, "no end"]),
    "a name of bytes": (entries((b"\xff\xfe", FLOAT)), [INDEX, "not text"]),
    "another model": (entries(), [INDEX, "not a BERT checkpoint"]),
    "a lost kernel": (without(KEY), [INDEX, "incomplete", "layer.1.attention.self.key"]),
    "a lost norm": (without("bert/embeddings/LayerNorm/gamma"), ["incomplete", "norm"]),
    "another width": (config(hidden_size=32), ["word_embeddings", "(37, 16)"]),
    "too many layers": (config(num_hidden_layers=3), ["incomplete", "layers.2"]),
    "too few words": (config(vocab_size=5), ["word_embeddings", "(5, 16)"]),
    "another activation": (config(hidden_act="swish"), ["bert_config.json", "swish"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoints_are_one_clear_line(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    checkpoint(folder)
    breaks, words = BROKEN[what]
    breaks(folder)
    with pytest.raises(UserError) as caught:
        read_all(open_contents(folder))
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_index_never_raises_another_error(seed: int, tmp_path: Path) -> None:
    """With changed bytes and corrected checksums of blocks."""
    rng = np.random.default_rng(seed)
    checkpoint(tmp_path / "bert")
    found = tmp_path / "bert" / INDEX
    said = {b"": number(1, 1), b"bert/a": FLOAT + piece(2, piece(2, number(1, 2))) + number(5, 8)}
    block = bytearray(block_of(sorted(said.items())))
    for at in rng.integers(0, len(block), 3):
        block[at] = rng.integers(256)
    body = bytes(block) + b"\0"
    data = body + masked_crc(body).to_bytes(4, "little")
    index = block_of([(b"z", varint(0) + varint(len(block)))]) + b"\0"
    handles = varint(0) + varint(0) + varint(len(data)) + varint(len(index) - 1)
    data += index + masked_crc(index).to_bytes(4, "little")
    found.write_bytes(data + handles.ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little"))
    with pytest.raises(UserError):
        open_contents(tmp_path / "bert")


def read_all(contents: CheckpointContents) -> None:
    for entry in contents.entries.values():
        entry.read()


def test_strange_files_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "corpus.index").write_bytes(b"something else")
    (tmp_path / "long.index").write_bytes(bytes(100))
    assert not recognises(tmp_path) and not recognises(tmp_path / "nowhere")
    assert not recognises(tmp_path / "corpus.index")
