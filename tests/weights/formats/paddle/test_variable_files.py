"""Paddle's binary files: every type, one or many variables per file, and files that contradict
themselves."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.paddle.variable_files import (
    is_variables,
    read_archive,
    read_combined,
    read_folder,
    read_variable,
)
from tests.weights.formats.paddle_made import (
    BFLOAT16,
    CODES,
    description,
    record,
    variable,
    write_folder,
)

ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)
GOOD = variable(ARRAY)


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "fc.w_0"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("dtype", CODES)
def test_every_type(tmp_path: Path, dtype: str) -> None:
    array = (np.arange(24) % 2 if dtype == "bool" else np.arange(24)).reshape(2, 3, 4)
    array = array.astype(dtype)
    stored = read_variable(written(tmp_path, variable(array)))
    assert stored.shape == (2, 3, 4)
    assert str(stored.dtype) == f"torch.{dtype}"
    assert np.array_equal(stored.read().numpy(), array)


def test_bfloat16(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0, 3e38]).bfloat16()
    bits = values.view(torch.int16).numpy().view(np.uint16)
    stored = read_variable(written(tmp_path, variable(bits, BFLOAT16)))
    assert stored.dtype is torch.bfloat16
    assert torch.equal(stored.read(), values)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (7, 1)])
def test_awkward_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)
    read = read_variable(written(tmp_path, variable(array))).read()
    assert np.array_equal(read.numpy(), array)


def test_packed_dimensions_and_sequence_offsets(tmp_path: Path) -> None:
    packed = b"\x08\x05\x12\x02\x03\x04"
    offsets = struct.pack("<QQ", 0, 3)
    path = written(tmp_path, record(packed, ARRAY.tobytes(), levels=[offsets]))
    assert np.array_equal(read_variable(path).read().numpy(), ARRAY)


def test_tensors_do_not_share_memory_with_the_file(tmp_path: Path) -> None:
    stored = read_variable(written(tmp_path, GOOD))
    stored.read().zero_()
    assert np.array_equal(stored.read().numpy(), ARRAY)


def test_a_file_that_shrank_after_opening(tmp_path: Path) -> None:
    stored = read_variable(path := written(tmp_path, GOOD))
    path.write_bytes(GOOD[:-1])
    with pytest.raises(UserError, match=r"fc\.w_0: has changed since it was opened"):
        stored.read()


def test_a_folder_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "params", {"a.w_0": ARRAY, "@LR_DECAY_COUNTER@": ARRAY[0]})
    for name in ("__model__", "vocab.txt", ".success", "ernie_config.json"):
        (folder / name).write_text("no variable")
    (folder / "sub").mkdir()
    assert read_folder(folder).keys() == {"a.w_0", "@LR_DECAY_COUNTER@"}


def test_several_in_one_file(tmp_path: Path) -> None:
    arrays = [ARRAY, ARRAY[0], np.float32(7).reshape(1)]
    path = written(tmp_path, b"".join(map(variable, arrays)))
    assert is_variables(path)
    for stored, array in zip(read_combined(path), arrays, strict=True):
        assert np.array_equal(stored.read().numpy(), array)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends inside its header: expected 4 bytes, got 0"),
    "cut in the head": (GOOD[:9], "ends inside its header"),
    "cut in the description": (GOOD[:22], "ends inside its description"),
    "cut in the values": (GOOD[:-1], r"ends inside the values of its shape \(3, 4\)"),
    "too long": (GOOD + b"\0", r"1 bytes more than its shape \(3, 4\) needs"),
    "a text": (b"[PAD]\n[CLS]\n[SEP]\n[MASK]\n", "not a Paddle variable: begins with version"),
    "a pickle": (b"\x80\x04}.    ", "not a Paddle variable: begins with version"),
    "another version": (b"\x01" + GOOD[1:], "begins with version 1, not 0"),
    "another tensor version": (GOOD[:12] + b"\x02" + GOOD[13:], "its tensor has version 2"),
    "many levels": (struct.pack("<IQ", 0, 10**9), "1000000000 levels of sequence offsets"),
    "a huge level": (struct.pack("<IQQ", 0, 1, 1 << 62), "ends inside its sequence offsets"),
    "no description": (struct.pack("<IQIi", 0, 0, 0, 0), "a description of 0 bytes"),
    "a negative description": (struct.pack("<IQIi", 0, 0, 0, -5), "a description of -5 bytes"),
    "a huge description": (struct.pack("<IQIi", 0, 0, 0, 1 << 30), "a description of 1073741824"),
    "huge dimensions": (record(description(5, (1 << 40, 1 << 40)), b""), "ends inside the values"),
    "a negative dimension": (record(description(5, (-1, 4)), b""), "a negative dimension"),
    "many dimensions": (record(description(5, [1] * 99), bytes(4)), "a shape of 99 dimensions"),
    "no number": (record(description(7, (1,)), bytes(4)), "Paddle's type 7 is not numeric"),
    "no type": (record(b"\x10\x01", bytes(4)), "Paddle's type None"),
    "another field": (record(b"\x08\x05\x1a\x01", b""), r"a garbled description \(field 0x1a\)"),
    "an endless number": (record(b"\x08" + b"\xff" * 20, b""), "a number of more than 64 bits"),
    "half a number": (record(b"\x08\x05\x10\x80", b""), "a garbled description"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files(tmp_path: Path, what: str) -> None:
    data, message = BROKEN[what]
    path = written(tmp_path, data)
    for read in (read_variable, lambda path: read_folder(path.parent)):
        with pytest.raises(UserError, match=message) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    for end in range(len(GOOD)):
        with pytest.raises(UserError):
            read_variable(written(tmp_path, GOOD[:end]))


def test_a_file_with_other_bytes_anywhere(tmp_path: Path) -> None:
    """Read or refused, and never anything else."""
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(1000):
        changed = bytearray(GOOD)
        for at in rng.integers(0, 28, rng.integers(1, 4)):
            changed[at] = rng.integers(256)
        try:
            read_variable(written(tmp_path, bytes(changed))).read()
        except UserError:
            refused += 1
    assert 0 < refused < 1000  # both ways were gone


def test_a_broken_one_among_several(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + GOOD[:-3])
    with pytest.raises(UserError, match=r"fc\.w_0: variable 2: ends inside the values"):
        read_combined(path)


def test_unreadable_files(tmp_path: Path) -> None:
    for read in (read_variable, read_folder, read_combined, read_archive):
        with pytest.raises(UserError, match="nowhere: cannot be read: No such file"):
            read(tmp_path / "nowhere")
    assert not is_variables(tmp_path / "nowhere")
    assert not is_variables(tmp_path)


# ---- PALM's archives ----


def archive(tmp_path: Path, add: Callable[[tarfile.TarFile], None], mode: str = "w") -> Path:
    path = tmp_path / "__palmmodel__"
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        add(tar)
    return path


def member(tar: tarfile.TarFile, name: str, data: bytes = GOOD, kind: bytes = b"0") -> None:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data) if kind == b"0" else 0, kind
    info.linkname = "/etc/passwd" if kind in b"12" else ""
    tar.addfile(info, io.BytesIO(data))


def test_an_archive_is_read_without_unpacking(tmp_path: Path) -> None:
    def add(tar: tarfile.TarFile) -> None:
        member(tar, "params", kind=tarfile.DIRTYPE)
        member(tar, "params/__paddlepalm_word_embedding")
        member(tar, "__palminfo__", b"names")

    found = read_archive(archive(tmp_path, add))
    assert found.keys() == {"__paddlepalm_word_embedding"}
    assert np.array_equal(found["__paddlepalm_word_embedding"].read().numpy(), ARRAY)
    assert [path.name for path in tmp_path.iterdir()] == ["__palmmodel__"]


HOSTILE: dict[str, tuple[Callable[[tarfile.TarFile], None], str]] = {
    "a way out": (lambda tar: member(tar, "../../a"), r"'\.\./\.\./a' leads out of the archive"),
    "an absolute name": (lambda tar: member(tar, "/etc/a"), "'/etc/a' leads out of the archive"),
    "a symbolic link": (
        lambda tar: member(tar, "a", kind=b"2"),
        "'a' is not a regular file; refused",
    ),
    "a hard link": (lambda tar: member(tar, "a", kind=b"1"), "'a' is not a regular file; refused"),
    "a device": (lambda tar: member(tar, "a", kind=b"3"), "'a' is not a regular file; refused"),
    "a pipe": (lambda tar: member(tar, "a", kind=b"6"), "'a' is not a regular file; refused"),
    "no variable": (lambda tar: member(tar, "a", b"x" * 40), "a: not a Paddle variable"),
    "several lines": (lambda tar: member(tar, "a\nb"), r"name is not printable, 'a\\nb'; refused"),
    "twice": (lambda tar: (member(tar, "x/a"), member(tar, "y/a"))[0], "y/a: duplicate member a"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_archives(tmp_path: Path, what: str) -> None:
    add, message = HOSTILE[what]
    with pytest.raises(UserError, match=message):
        read_archive(archive(tmp_path, add))


def test_files_that_are_not_archives(tmp_path: Path) -> None:
    packed = archive(tmp_path, lambda tar: member(tar, "a"), "w:gz")
    with pytest.raises(UserError, match="cannot be read as an uncompressed tar"):
        read_archive(packed)
    whole = archive(tmp_path, lambda tar: member(tar, "a", GOOD * 50))
    whole.write_bytes(whole.read_bytes()[:1000])
    with pytest.raises(UserError, match="a: the archive ends inside it|cannot be read as"):
        read_archive(whole)
