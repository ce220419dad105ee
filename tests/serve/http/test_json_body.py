"""Bodies that Python's JSON parser lets pass, or fails on."""

from __future__ import annotations

import time

import pytest
from fastapi import HTTPException

from palm_ds.serve.http.json_body import parsed

REFUSED = [
    (b'{"texts": [', "Expecting value at character 12"),
    (b'{"texts": ["a"], "texts": ["b"]}', "key 'texts' is given twice"),
    (b'{"texts": [NaN]}', "NaN is not a number"),
    (b'{"texts": [-Infinity]}', "-Infinity is not a number"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"a":' * 200_000, "nested too deeply"),
    (b'{"top": ' + b"9" * 5000 + b"}", "a number has too many digits"),
    (b'{"texts": ["\xff"]}', "byte 13 is not UTF-8"),
]


@pytest.mark.parametrize(("body", "why"), REFUSED)
def test_what_is_no_json_is_one_line(body: bytes, why: str) -> None:
    with pytest.raises(HTTPException) as raised:
        parsed(body)
    assert (raised.value.status_code, raised.value.detail) == (422, f"the body: not JSON: {why}")


def test_json_is_read() -> None:
    assert parsed('{"a": [1, 2.5, "é😀"]}'.encode()) == {"a": [1, 2.5, "é😀"]}
    assert parsed("\ufeff[]".encode()) == []


def test_many_keys_take_no_long_time() -> None:
    body = "{" + ",".join(f'"{n}":0' for n in range(200_000)) + ',"7":1}'
    began = time.monotonic()
    with pytest.raises(HTTPException, match="key '7' is given twice"):
        parsed(body.encode())
    assert time.monotonic() - began < 5
