"""Paddle's pickles of every era are read; anything else is refused by name."""

from __future__ import annotations

import collections
import os
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.paddle.pdparams import BIG_TABLE, NAME_TABLE, read_pickle

RNG = np.random.default_rng(1)
WEIGHT = RNG.normal(size=(6, 50)).astype(np.float32)  # large enough to leave pickle's frames early
BIAS = RNG.normal(size=4).astype(np.float32)


class Calls:
    """Pickles as a call of anything with anything."""

    def __init__(self, thing: Any, *arguments: Any, state: Any = None):
        self.made = (thing, arguments) if state is None else (thing, arguments, state)

    def __reduce__(self) -> Any:
        return self.made


def written(tmp_path: Path, content: Any, protocol: int = 4) -> Path:
    path = tmp_path / "model.pdparams"
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_state_and_its_table(tmp_path: Path, protocol: int) -> None:
    table = {"fc.weight": "linear_0.w_0", "fc.bias": "linear_0.b_0"}
    state = {"fc.weight": WEIGHT, "fc.bias": BIAS, NAME_TABLE: table, "epoch": 3}
    found = read_pickle(written(tmp_path, state, protocol))
    assert found.tensors.keys() == {"fc.weight", "fc.bias"}
    assert np.array_equal(found.tensors["fc.weight"].read().numpy(), WEIGHT)
    assert np.array_equal(found.tensors["fc.bias"].read().numpy(), BIAS)
    assert found.parameter_names == table
    assert found.others == {"epoch": "int"}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "dtype", ["bool", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", "c8", "c16"]
)
def test_every_type(tmp_path: Path, dtype: str, protocol: int) -> None:
    array = RNG.integers(0, 2, (5, 7)).astype(dtype)
    found = read_pickle(written(tmp_path, {"a": array}, protocol)).tensors["a"].read()
    assert found.numpy().dtype == array.dtype
    assert np.array_equal(found.numpy(), array)


def test_bfloat16_is_kept_as_unsigned_integers(tmp_path: Path) -> None:
    values = torch.tensor([[1.5, -2.0], [3e38, 0.0]]).bfloat16()
    bits = values.view(torch.int16).numpy().view(np.uint16)
    found = read_pickle(written(tmp_path, {"a": bits})).tensors["a"]
    assert torch.equal(found.read(), values)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 4)])
def test_shapes_and_orders(tmp_path: Path, shape: tuple[int, ...], protocol: int) -> None:
    array = RNG.normal(size=shape)
    state = {"rows": array, "columns": np.array(array, order="F")}
    for stored in read_pickle(written(tmp_path, state, protocol)).tensors.values():
        assert stored.shape == shape
        assert np.array_equal(stored.read().numpy(), array)


def test_sliced_arrays_are_joined(tmp_path: Path) -> None:
    flat = WEIGHT.flatten()
    parts = {"w@@.0": flat[:70], "w@@.1": flat[70:140], "w@@.2": flat[140:]}
    table = {"w": {"OriginShape": WEIGHT.shape, "slices": list(parts)}}
    for protocol in (2, 3):
        found = read_pickle(written(tmp_path, {**parts, BIG_TABLE: table}, protocol))
        assert found.tensors.keys() == {"w"}
        assert np.array_equal(found.tensors["w"].read().numpy(), WEIGHT)


def test_nested_objects(tmp_path: Path) -> None:
    weight = Calls(tuple, ("linear_0.w_0", WEIGHT))
    lod = Calls(eval, "data", {"data": BIAS})
    state = {"model": collections.OrderedDict(weight=weight), "more": [lod, {"deep": BIAS}]}
    found = read_pickle(written(tmp_path, state)).tensors
    assert found.keys() == {"model.weight", "more.0", "more.1.deep"}
    assert np.array_equal(found["model.weight"].read().numpy(), WEIGHT)
    assert np.array_equal(found["more.0"].read().numpy(), BIAS)
    assert read_pickle(written(tmp_path, weight)).tensors.keys() == {"linear_0.w_0"}
    assert read_pickle(written(tmp_path, {})).tensors == {}


def test_python_2(tmp_path: Path) -> None:
    """Byte strings instead of text, and an OrderedDict made of pairs."""
    values = b"\xff\xfe\x00\x80" + BIAS.tobytes()[4:]
    kind = b"cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    array += b"(K\x01K\x04\x85" + kind + b"\x89U\x10" + values + b"tb"
    pairs = b"ccollections\nOrderedDict\n]](U\x04bias" + array + b"ea\x85R"
    found = read_pickle(written(tmp_path, b"\x80\x02" + pairs + b"."))
    assert found.tensors["bias"].read().numpy().tobytes() == values


def test_values_are_read_on_demand(tmp_path: Path) -> None:
    for protocol in (2, 4):
        path = written(tmp_path, {"a": WEIGHT}, protocol)
        stored = read_pickle(path).tensors["a"]
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(UserError, match="has changed since it was opened|cannot be read"):
            stored.read()


# ---- files that are not ----


def array_of(
    shape: bytes, kind: bytes = b"f4", order: bytes = b"<", data: bytes = bytes(16)
) -> bytes:
    """A pickle of one array, as numpy writes it except for the given parts."""
    dtype = b"cnumpy\ndtype\nX" + struct.pack("<I", len(kind)) + kind + b"\x89\x88\x87R"
    dtype += b"(K\x03X" + struct.pack("<I", len(order)) + order + b"NNNJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    raw = b"B" + struct.pack("<I", len(data)) + data
    return b"\x80\x04" + empty + b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb."


def endless() -> dict:
    loop: dict = {}
    loop["again"] = loop
    return loop


def laughing() -> list:
    """Small to write, endless to read."""
    items: list = []
    for _ in range(12):
        items = [items] * 30
    return items


def many_names() -> dict:
    return {NAME_TABLE: {f"w{i}": "b" for i in range(300)}, "a": 1}


HOSTILE: dict[str, tuple[Any, str]] = {
    "os.system": (Calls(os.system, "touch /tmp/owned"), r"asks for (posix|nt)\.system, which"),
    "in a state": ({"w": Calls(os.system, "true")}, r"asks for (posix|nt)\.system"),
    "eval of code": (
        Calls(eval, "__import__('os').system('true')"),
        "calls builtins.eval in a way",
    ),
    "eval of other data": (Calls(eval, "data", {"data": "x"}), "calls builtins.eval in a way"),
    "eval of data and more": (Calls(eval, "data", {"data": BIAS, "x": 1}), "calls builtins.eval"),
    "eval of another name": (Calls(eval, "date", {"data": BIAS}), "calls builtins.eval"),
    "exec": (Calls(exec, "1"), "asks for builtins.exec"),
    "getattr": (Calls(getattr, "a", "upper"), "asks for builtins.getattr"),
    "a function of numpy": (Calls(np.load, "x"), r"asks for numpy(\.\w+)?\.load|asks for numpy"),
    "a torch tensor": (torch.ones(2), r"asks for torch\._utils\._rebuild_tensor_v2"),
    "a class": (Path("x"), "asks for pathlib"),
    "bytes from text in another coding": (
        b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0rot13\x86R.",
        "calls _codecs.encode in a way",
    ),
    "a tuple of nothing": (Calls(tuple, 5), "calls builtins.tuple in a way"),
    "an object array": (np.array([{}, None], object), "an array of type 'O8'"),
    "a text array": (np.array(["a", "b"]), "an array of type 'U1'"),
    "a structured array": (np.zeros(2, "i4,f4"), "an array of type 'V8'"),
    "another byte order": (np.ones(4, ">f4"), "fills in dtype in a way"),
    "a numpy number": (np.float32(1), "asks for numpy.*scalar"),
    "fewer bytes": (array_of(b"K\x05\x85"), r"an array of \(5\) f4 in 16 bytes, not 20"),
    "more bytes": (array_of(b"K\x03\x85"), r"an array of \(3\) f4 in 16 bytes, not 12"),
    "a huge shape": (array_of(b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"), "in 16 bytes, not"),
    "a negative shape": (array_of(b"J\xfc\xff\xff\xff\x85"), r"an array with shape \(-4\)"),
    "a shape of text": (array_of(b"X\x01\0\0\0a\x85"), r"an array with shape \(chars\)"),
    "no shape": (array_of(b"N"), "an array with shape nonetype"),
    "an array without values": (array_of(b"")[:-1].split(b"(K\x01")[0] + b".", "without values"),
    "protocol 5": (pickle.dumps({"a": BIAS}, 5), "pickle protocol 5; Paddle uses 2 to 4"),
    "a persistent id": (b"\x80\x02X\x01\0\0\0aQ.", "the instruction BINPERSID is not used"),
    "an object": (b"\x80\x02cnumpy\ndtype\n)\x81.", "the instruction NEWOBJ is not used"),
    "an extension": (b"\x80\x02\x82\x01.", "the instruction EXT1 is not used"),
    "an old instruction": (b"\x80\x02(ios\nsystem\n.", "the instruction INST is not used"),
    "no instruction": (b"\x80\x02\xff.", r"the instruction '\\xff' is none|the instruction b"),
    "a key that is no text": ({1: BIAS}, "expected a name, got int"),
    "a set": ({"a": {1}}, "the instruction EMPTY_SET is not used|asks for builtins.set"),
    "nothing to pop": (b"\x80\x02.", "garbled: the stack is empty"),
    "nothing under a mark": (b"\x80\x02N(0.", "the instruction POP is not used|garbled"),
    "nothing kept": (b"\x80\x02h\x07.", "garbled: memo 7 is empty"),
    "no mark": (b"\x80\x02u.", "garbled: no mark"),
    "keys for a list": (b"\x80\x02](NNu.", "garbled: keys and values for list"),
    "items for a dict": (b"\x80\x02}(Ne.", "garbled: dict is not a list"),
    "a call of a number": (b"\x80\x02K\x01)R.", "garbled: calls int"),
    "a huge string": (b"\x80\x04\x8d" + b"\xff" * 8 + b"a.", "the file ends inside a string of"),
    "a string of less than nothing": (
        b"\x80\x02T\xff\xff\xff\xffa.",
        "inside a string of -1 bytes",
    ),
    "a huge integer": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "an integer of 2147483647 bytes"),
    "a name without end": (b"\x80\x02cnumpy", "garbled: a global's name has no end"),
    "a name that is no text": (b"\x80\x04}X\x01\0\0\0\xffNs.", "garbled: a name that is not UTF-8"),
    "a name of several lines": ({"a\nb\x1b[2J": BIAS}, r"a name that is not printable, 'a\\nb"),
    "without end": (endless(), "nested too deeply; refused"),
    "laughing": ({"a": laughing()}, "nested too deeply; refused"),
    "laughing names": ([many_names()] * 3000, "StructuredToParameterName@@: nested too deeply"),
    "one array for many": (
        dict.fromkeys("abcdefgh", np.zeros(4000)),
        "the same values are used again and again",
    ),
    "instructions": (b"\x80\x02" + b"Nq\x01" * 500_000, "more than 500,000 instructions; refused"),
    "deep": (b"\x80\x02" + b"]" * 1000 + b"a" * 999 + b".", "nested too deeply; refused"),
    "empty": (b"", "not a pickle of protocol 2 to 4"),
    "a text": (b"{'a': 1}", "not a pickle of protocol 2 to 4, as .pdparams files are; the binary"),
    "protocol 0": (pickle.dumps({"a": 1}, 0), "not a pickle of protocol 2 to 4"),
    "a table that is none": (
        {NAME_TABLE: [1]},
        "StructuredToParameterName@@ is not a table of names",
    ),
    "pieces that are lost": (
        {BIG_TABLE: {"w": {"OriginShape": (2,), "slices": ["w@@.0"]}}},
        "UnpackBigParamInfor@@: w: some of its 1 slices are missing",
    ),
    "pieces that do not fit": (
        {"w@@.0": BIAS, BIG_TABLE: {"w": {"OriginShape": (3, 3), "slices": ["w@@.0"]}}},
        r"w: its slices do not add up to the shape \(3, 3\)",
    ),
    "pieces of another kind": ({BIG_TABLE: {"w": 7}}, "w: not as Paddle writes it"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_and_broken_files(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = HOSTILE[what]
    path = written(tmp_path, content)
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("it ran"))
    began = time.process_time()
    with pytest.raises(UserError, match=message) as caught:
        read_pickle(path)
    assert time.process_time() - began < 3, "a refusal takes a second at most"
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_cut_anywhere(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"a": BIAS, NAME_TABLE: {"a": "b"}}, protocol)
    for end in range(len(data)):
        with pytest.raises(UserError):
            read_pickle(written(tmp_path, data[:end]))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_with_other_bytes_anywhere(tmp_path: Path, protocol: int) -> None:
    """Read or refused, and never anything else."""
    data = pickle.dumps({"a": BIAS, "b": [Calls(eval, "data", {"data": BIAS})]}, protocol)
    rng = np.random.default_rng(protocol)
    refused = 0
    for _ in range(1500):
        changed = bytearray(data)
        for at in rng.integers(1, len(data), rng.integers(1, 4)):
            changed[at] = rng.integers(256)
        try:
            found = read_pickle(written(tmp_path, bytes(changed)))
            for stored in found.tensors.values():
                stored.read()
        except UserError:
            refused += 1
    assert 0 < refused < 1500  # both ways were gone


# ---- files that Paddle wrote ----


@pytest.fixture(scope="module")
def oracle(shared: Path) -> Path:
    if not (folder := shared / "oracle").is_dir():
        pytest.skip(f"{folder} is not here")
    return folder


def test_every_genuine_file(oracle: Path) -> None:
    paths = [path for end in ("pdparams", "pdopt", "pdt") for path in oracle.rglob(f"*.{end}")]
    assert len(paths) >= 26
    for path in paths:
        for stored in read_pickle(path).tensors.values():
            assert stored.read().shape == stored.shape


WEIGHTS = {
    "dygraph185_py27": ["saved_weights.pdparams"],
    "dygraph185_py37": ["saved_weights.pdparams"],
    "develop262": ["saved_weights.pdparams", "bigparam.pdparams"],
    "fluid_ernie2": ["program/model.pdparams"],
    "paddlenlp_ernie": ["model_state.pdparams"],
    "paddlenlp_ernie_mlm": ["model_state.pdparams"],
    "paddlenlp_bert": ["model_state.pdparams"],
    "paddlenlp_roberta": ["model_state.pdparams"],
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_genuine_weights_bit_for_bit(oracle: Path, case: str) -> None:
    truth = np.load(oracle / case / "weights.npz")
    for file in WEIGHTS[case]:
        found = read_pickle(oracle / case / file).tensors
        for name in truth.files:
            assert np.array_equal(found[name].read().numpy(), truth[name]), name


def test_the_same_state_in_every_shape(oracle: Path) -> None:
    folder = oracle / "pickles262"
    read: Callable[[str], dict] = lambda name: {  # noqa: E731
        key: stored.read() for key, stored in read_pickle(folder / name).tensors.items()
    }
    state = read("sd.pdparams")
    for name in ("sd_p2.pdparams", "sd_p3.pdparams", "sd_p4.pdparams"):
        other = read(name)
        assert other.keys() == state.keys() == {"weight", "bias"}
        assert all(torch.equal(other[key], state[key]) for key in state)
    assert {x.dtype for x in read("bf16.pdparams").values()} == {torch.bfloat16}
    assert {x.dtype for x in read("fp16.pdparams").values()} == {torch.float16}
    assert read("nested.pdparams").keys() == {"model.weight", "model.bias"}
    assert read("lod_nested.pdt").keys() == {"m.w"}
