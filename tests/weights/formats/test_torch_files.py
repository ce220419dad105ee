"""Files of torch.save that are hostile, damaged or not weights: one line, in bounded memory."""

from __future__ import annotations

import io
import os
import pickle
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.torch_files import MOST_INSTRUCTIONS, load_torch, open_torch


class Asks:
    """A callable for a pickle, and its arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: object):
        self.asked = function, arguments

    def __reduce__(self) -> tuple:
        return self.asked


def saved(path: Path, content: object, **options: Any) -> None:
    torch.save(content, path, **options)


def repacked(path: Path, *, compress: int = zipfile.ZIP_STORED, **members: bytes) -> None:
    """torch's archive with other members."""
    saved(path, {"a": torch.zeros(3)})
    with zipfile.ZipFile(path) as archive:
        kept = {name.rpartition("/")[2]: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in {**kept, **{x.replace("_", "."): y for x, y in members.items()}}.items():
            archive.writestr(f"archive/{name}", data)


def expanded(path: Path) -> None:
    """87 KB that would become 528 MB."""
    saved(path, {"a": torch.zeros(22_000).expand(6_000, 22_000)})


def shared(path: Path) -> None:
    one = torch.zeros(10_000)
    saved(path, {f"layer.{i}": one for i in range(200)})


def stored_nowhere(path: Path) -> None:
    """A storage that the pickle creates, larger than the file."""

    class Tensor:
        def __reduce__(self) -> tuple:
            storage = Asks(torch.FloatStorage, 1 << 27)
            return rebuild_tensor, (storage, 0, (1 << 27,), (1,), False, {})

    saved(path, {"a": Tensor()})


def two_pickles(path: Path) -> None:
    """torch reads the last of them, as it does not tell capitals from small letters."""
    saved(path, {"a": torch.ones(1)})
    with zipfile.ZipFile(path, "a") as archive:
        first = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{first}/DATA.PKL", pickle.dumps({"a": Asks(bytearray, 10**9)}, 2))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a call": (lambda p: saved(p, {"a": Asks(os.system, "true")}), r"asks for (posix|nt)\.system"),
    "a call, legacy": (
        lambda p: saved(p, {"a": Asks(os.system, "")}, _use_new_zipfile_serialization=False),
        r"asks for (posix|nt)\.system, which files of weights do not; refused",
    ),
    "a call, protocol 4": (
        lambda p: saved(p, {"a": Asks(os.system, "")}, pickle_protocol=4),
        r"asks for (posix|nt)\.system",
    ),
    "a call, protocol 0": (
        lambda p: repacked(p, data_pkl=b"(S'true'\nios\nsystem\n."),
        r"asks for os\.system",
    ),
    "a name with a command": (
        lambda p: repacked(p, data_pkl=b"cevil\n\x1b[2J\n."),
        r"asks for evil\.\\x1b\[2J",
    ),
    "an object": (lambda p: saved(p, {"a": Path("x")}), r"asks for pathlib"),
    "memory": (lambda p: saved(p, {"a": Asks(bytearray, 10**12)}), r"asks for __builtin__.bytea"),
    "sparse": (lambda p: saved(p, {"a": torch.eye(3).to_sparse()}), "holds a sparse tensor; save"),
    "meta": (lambda p: saved(p, {"a": torch.empty(3, device="meta")}), r"without values \(device"),
    "quantized": (
        lambda p: repacked(p, data_pkl=b"ctorch._utils\n_rebuild_qtensor\n."),
        "holds a quantized tensor",
    ),
    "expanded": (expanded, r"a: has the shape \(6000, 22000\), but only 22,000 values are stored"),
    "shared by many": (shared, "the same values are used again and again"),
    "stored nowhere": (stored_nowhere, "the same values are used again and again|cannot be read"),
    "keys of integers": (lambda p: saved(p, {0: torch.ones(1)}), "has the key 0; expected tensors"),
    "a list": (lambda p: saved(p, [1]), "holds a list; expected tensors by name"),
    "a training state": (
        lambda p: saved(p, {"model": {"a": torch.ones(1)}, "epoch": 3}),
        "model: is a dict; expected tensors by name",
    ),
    "a checkpoint of Lightning": (
        lambda p: saved(p, {"state_dict": {"a": torch.ones(1)}, "epoch": 3}),
        "is a training checkpoint; save its weights alone",
    ),
    "compressed": (
        lambda p: repacked(p, compress=zipfile.ZIP_DEFLATED, data_0=bytes(10**6)),
        "is compressed, as torch.save's files never are",
    ),
    "a second pickle, which torch would read": (
        two_pickles,
        "has two members of one name, as torch.save's files never do",
    ),
    "a program": (lambda p: repacked(p, constants_pkl=b"."), "is a TorchScript program; save"),
    "another zip": (lambda p: zipfile.ZipFile(p, "w").writestr("a", "b"), "not one of torch.save"),
    "instructions": (
        lambda p: repacked(p, data_pkl=b"\x80\x02" + b"N0" * MOST_INSTRUCTIONS + b"."),
        "a pickle of over 500,000 instructions; refused",
    ),
    "cut short": (lambda p: (expanded(p), os.truncate(p, 60_000)), "cannot be read as a file of"),
    "a cut pickle": (lambda p: repacked(p, data_pkl=b"\x80\x02}X\xff\0\0\0a"), "cannot be read as"),
    "an old tar": (lambda p: p.write_bytes(b"storages" + bytes(600)), "neither a zip nor a pickle"),
    "a plain pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1}, 2)), "cannot be read as a"),
    "a pointer": (
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`",
    ),
    "a Keras file": (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "is a Keras file"),
    "no file": (lambda p: None, "cannot be read as a file of torch.save: "),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_one_line(what: str, tmp_path: Path) -> None:
    makes, message = HOSTILE[what]
    path = tmp_path / "pytorch_model.bin"
    makes(path)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(UserError, match=message) as caught:
            open_torch(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 8, "a second without tracemalloc"
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and said.isprintable()
    assert "weights_only" not in said and "trust" not in said.lower()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_genuine_file_is_read(zipped: bool, tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    tied = torch.randn(4, 4)
    state = {
        "tied": tied,
        "again": tied.T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "ids": torch.arange(5).expand(1, -1),
        "parameter": linear.weight,
        "nothing": torch.empty(0, 3),
    }
    torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    found = open_torch(tmp_path / "x.bin")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_further_classes_are_named(tmp_path: Path) -> None:
    class StandIn:
        def __init__(self, *_: object):
            pass

    file = io.BytesIO()
    torch.save({"a": Asks(Path, "x")}, file)
    (tmp_path / "x.pt").write_bytes(file.getvalue())
    names = ["pathlib.Path", "pathlib._local.Path"]
    found = load_torch(tmp_path / "x.pt", [(type("S", (StandIn,), {}), name) for name in names])
    assert isinstance(found["a"], StandIn)
