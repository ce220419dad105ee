"""JSON that every reader accepts."""

from __future__ import annotations

import json
import math
from pathlib import Path

from palm_ds.common.json_files import nan_to_null, write_json


def test_json_is_readable_text(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": "北京", "a": [1]})
    text = (tmp_path / "a.json").read_text("utf-8")
    assert text == '{\n  "b": "北京",\n  "a": [\n    1\n  ]\n}\n'
    assert json.loads(text) == {"b": "北京", "a": [1]}


def test_values_that_json_lacks_become_null() -> None:
    values = {1: math.nan, "b": (math.inf, 2.5, "x", None, True), "c": {"d": -math.inf}}
    expected = {"1": None, "b": [None, 2.5, "x", None, True], "c": {"d": None}}
    assert nan_to_null(values) == expected
