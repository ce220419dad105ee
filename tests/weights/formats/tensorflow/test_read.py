"""TensorFlow's BERT checkpoints without TensorFlow: real, made here, and broken."""

from __future__ import annotations

import os
from collections.abc import Callable
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
from palm_ds.weights.formats.tensorflow.read import open_contents, recognizes
from palm_ds.weights.formats.tensorflow.tensor_bundle import crc32c, masked_crc, open_bundle
from tests.weights.formats.hf_models import build, inputs_of, outputs, run
from tests.weights.formats.huggingface.test_read import compare_with_recorded
from tests.weights.formats.tensorflow_made import (
    DTYPES,
    block_of,
    checkpoint,
    number,
    piece,
    table_of,
    varint,
    write_bundle,
)

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
        assert recognizes(tmp_path / path)
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


def entries(*said: tuple[bytes, bytes], way: int = 0) -> Callable[[Path], object]:
    """Replaces the index by one with these entries."""
    header = (b"", number(1, 1))
    return lambda f: (f / INDEX).write_bytes(table_of([header, *said], way=way))


FLOAT = number(1, 1)
BROKEN = {
    "no index": (lambda f: (f / INDEX).unlink(), ["not a TensorFlow checkpoint"]),
    "two checkpoints": (lambda f: (f / "b.ckpt.index").write_text(""), ["several", "bert_model"]),
    "index empty": (lambda f: os.truncate(f / INDEX, 0), [INDEX]),
    "index cut short": (cut(INDEX, 9), [INDEX, "truncated"]),
    "index without its end": (lambda f: os.truncate(f / INDEX, 47), [INDEX, "truncated"]),
    "a block damaged": (flip(INDEX, 3), [INDEX, "checksum"]),
    "the footer damaged": (flip(INDEX, -45), [INDEX]),
    "snappy": (entries(way=1), [INDEX, "snappy"]),
    "another compression": (entries(way=4), [INDEX, "method 4"]),
    "data damaged": (flip(DATA, 20), [DATA, "damaged", "checksum"]),
    "no header": (lambda f: (f / INDEX).write_bytes(table_of([(b"a", FLOAT)])), [INDEX, "header"]),
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
