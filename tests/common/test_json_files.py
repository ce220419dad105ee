from __future__ import annotations

import json
import math
import random
from pathlib import Path

from palm_ds.common.json_files import SEAL, seal_problem, write_json, write_sealed_json
from palm_ds.common.messages import nan_to_null


def test_json_is_readable_text(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": "北京", "a": [1]})
    text = (tmp_path / "a.json").read_text("utf-8")
    assert text == '{\n  "b": "北京",\n  "a": [\n    1\n  ]\n}\n'
    assert json.loads(text) == {"b": "北京", "a": [1]}


def test_values_that_json_lacks_become_null() -> None:
    values = {1: math.nan, "b": (math.inf, 2.5, "x", None, True), "c": {"d": -math.inf}}
    expected = {"1": None, "b": [None, 2.5, "x", None, True], "c": {"d": None}}
    assert nan_to_null(values) == expected


CONTENT = {"format": 3, "counts": {"a": 12, "é\n": 1e-05}, "files": [], "hash": "0" * 64}


def problem(text: str) -> str:
    return seal_problem(text, json.loads(text))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_sealed_json(file, CONTENT)
    text = file.read_text()
    assert problem(text) == "" and {**json.loads(text), SEAL: None} == {**CONTENT, SEAL: None}
    write_sealed_json(file, CONTENT)
    assert file.read_text() == text


def test_a_seal_is_required() -> None:
    assert problem(json.dumps(CONTENT)) == f"`{SEAL}` is missing"
    assert problem(json.dumps({**CONTENT, SEAL: "1"})) == f"`{SEAL}` is missing"


def noticed(data: bytes) -> bool:
    try:
        return problem(data.decode("utf-8")) != ""
    except ValueError:  # no UTF-8, or no JSON
        return True


def test_every_bit_counts(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_sealed_json(file, CONTENT)
    data = file.read_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert noticed(bytes(flipped)), f"bit {bit % 8} of byte {bit // 8}: {bytes(flipped)}"


def test_damage_of_several_bytes(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_sealed_json(file, CONTENT)
    data, random_ = file.read_bytes(), random.Random(1)
    for _ in range(500):
        at, size = random_.randrange(len(data)), random_.randrange(1, 40)
        other = data[:at] + random_.randbytes(size) + data[at + size :]
        assert other == data or noticed(other)
