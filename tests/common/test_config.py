"""Strict configuration: every mistake is one line with the file, the key and the remedy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from pydantic import NonNegativeInt

from palm_ds.common.config import (
    check_keys,
    differences,
    override,
    parse,
    parse_override,
    read_json,
    read_yaml,
)
from palm_ds.common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise UserError("rate: must be at most 1")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    steps: NonNegativeInt = 0
    on: bool = False
    kind: Literal["plain", "fancy"] = "plain"
    parts: tuple[int, ...] = ()
    inner: Inner = Inner()
    named: dict[str, Inner] = field(default_factory=dict)


GOOD = {"name": "a", "steps": 3, "parts": [1, 2], "inner": {"rate": 1}, "named": {"x": {}}}


@pytest.mark.parametrize("strict", [False, True])
def test_nested_mappings_become_dataclasses(strict: bool) -> None:
    wanted = Outer(name="a", steps=3, parts=(1, 2), inner=Inner(rate=1), named={"x": Inner()})
    assert parse(Outer, GOOD, "file", strict=strict) == wanted


def test_yaml_is_parsed_leniently_and_json_strictly() -> None:
    parse(Outer, {"name": "first"}, "", strict=True)  # leaves no trace on the class
    assert parse(Inner, {"rate": "1e-4"}, "").rate == 1e-4  # YAML reads it as text
    assert parse(Outer, {"name": 5}, "").name == "5"
    for values in ({"name": 5}, {"name": "a", "on": 1}, {"name": "a", "inner": {"rate": "1"}}):
        with pytest.raises(UserError, match=r"^f\.\w+(\.rate)?: expected .*, got "):
            parse(Outer, values, "f", strict=True)


BAD = [
    ({"nam": 1}, r'^f\.nam: unknown key; did you mean "name"\?$'),
    ({"name": "a", "inner": {"rat": 1}}, r'^f\.inner\.rat: unknown key; did you mean "rate"\?$'),
    ({"name": "a", "rate": 1}, r'^f\.rate: unknown key; did you mean "f\.inner\.rate"\?$'),
    ({"name": "a", "named": {"x": {"rat": 1}}}, r"^f\.named\.x\.rat: unknown key"),
    ({"name": "a", "inner": {"on": 1}}, r'^f\.inner\.on: unknown key; did you mean "f\.on"\?$'),
    ({"named": {"x": {"steps": 1}}}, r'^f\.named\.x\.steps: .*; did you mean "f\.steps"\?$'),
    ({}, r"^f\.name: missing; it must be given$"),
    ({"name": "a", "steps": -1}, r"^f\.steps: expected 0 or more, got -1$"),
    ({"name": "a", "steps": "many"}, r'^f\.steps: expected a whole number, got "many"$'),
    ({"name": False}, r"^f\.name: expected text, got false; YAML reads yes, no, .* quoted"),
    ({"name": "a", "steps": 1.5}, r"^f\.steps: expected a whole number, got 1\.5$"),
    ({"name": "a", "steps": True}, r"^f\.steps: expected a whole number, got true$"),
    ({"name": "a", "inner": {"rate": False}}, r"^f\.inner\.rate: expected a number, got false$"),
    ({"name": "a", "on": "perhaps"}, r'^f\.on: expected true or false, got "perhaps"$'),
    ({"name": "a", "inner": 3}, r"^f\.inner: expected keys and values, got 3$"),
    ({"name": "a", "inner": {"rate": "x"}}, r'^f\.inner\.rate: expected a number, got "x"$'),
    ({"name": "a", "inner": {"rate": 2}}, r"^f\.inner: rate: must be at most 1$"),
    ({"name": "a", "parts": 5}, r"^f\.parts: expected a list, got 5$"),
    ({"name": "a", "kind": "plane"}, r"^f\.kind: .*'plain' or 'fancy', got \"plane\"$"),
    ({"name": "a", "kind": "p" * 99}, r"^f\.kind: .*\.\.\.$"),
    ([1], r"^f: expected keys and values, got \[1\]$"),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("values", "message"), BAD, ids=[message for _, message in BAD])
def test_a_mistake_is_one_line(values: object, message: str, strict: bool) -> None:
    with pytest.raises(UserError, match=message):
        parse(Outer, values, "f", strict=strict)


def test_check_keys_alone() -> None:
    assert check_keys({"a": 1}, {"a", "b"}, "f") == {"a": 1}
    with pytest.raises(UserError, match=r"^f\.ab: unknown key; did you mean"):
        check_keys({"ab": 1}, {"a", "b"}, "f")


FILES = {
    "duplicate.yaml": ("a: 1\nb:\n  c: 1\n  c: 2\n", r'duplicate.yaml:4: .*duplicate key "c"$'),
    "duplicate.json": ('{"a": {"c": 1, "c": 2}}', r'duplicate.json: duplicate key "c"$'),
    "broken.yaml": ("a: [1\nb: 2\n", r"broken.yaml:\d: not valid YAML: "),
    "broken.json": ('{\n "a" {}}', r"broken.json:2:6: not valid JSON: "),
    "list.yaml": ("- 1\n", r"list.yaml: expected keys and values, got \[1\]$"),
    "list.json": ("[1]", r"list.json: expected keys and values, got \[1\]$"),
    "empty.yaml": ("", r"empty.yaml: is empty; expected keys and values$"),
    "empty.json": ("", r"empty.json:1:1: not valid JSON"),
    "deep.yaml": ("a: " + "[" * 3000, r"deep.yaml: not valid YAML: nested too deeply$"),
    "deep.json": ('{"a":' * 200_000, r"deep.json: not valid JSON: nested too deeply$"),
    "digits.yaml": ("a: " + "9" * 5000, r"digits.yaml:1: .*9\.\.\. cannot be read as int$"),
    "digits.json": ('{"a": ' + "9" * 5000, r"digits.json: not valid JSON: .*5000 digits"),
    "date.yaml": ("a: 1\nb: 2020-13-01", r'date.yaml:2: .*"2020-13-01" cannot be read as timest'),
    "sixties.yaml": ("a: 1" + ":59" * 300 + ".5", r"sixties.yaml:1: .* cannot be read as float$"),
    "aliases.yaml": (
        "a: &a0 [x]\n" + "".join(f"b{n}: &a{n} [{f'*a{n - 1}, ' * 10}]\n" for n in range(1, 10)),
        r"aliases.yaml:7: not valid YAML: aliases stand for more than 1,000,000 values, or for th",
    ),
    "merged.yaml": (
        "a: &a0 {x: 1}\n"
        + "".join(f"b{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 10}]}}\n" for n in range(1, 10)),
        r"merged.yaml:\d: not valid YAML: aliases stand for more than",
    ),
    "itself.yaml": ("a: &a [*a]", r"itself.yaml:1: not valid YAML: aliases .* or for themselves$"),
    "tagged.yaml": ("a: !!bool perhaps", r'tagged.yaml:1: .*"perhaps" cannot be read as bool$'),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_one_line(name: str, tmp_path: Path) -> None:
    text, message = FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        (read_yaml if name.endswith("yaml") else read_json)(tmp_path / name)


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_an_unreadable_file(read, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none: no such file$"):
        read(tmp_path / "none")
    (tmp_path / "recipe.yaml").write_text("a: 1")
    with pytest.raises(UserError, match='recipe.yml: no such file; did you mean ".*recipe.yaml"'):
        read(tmp_path / "recipe.yml")
    with pytest.raises(UserError, match="is a folder; expected a file$"):
        read(tmp_path)
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(UserError, match="latin: cannot be read as text: .*utf-8"):
        read(tmp_path / "latin")


def test_overrides() -> None:
    values = {"optimizer": {"lr": 1.0}, "seed": 1}
    for text in ("optimizer.lr=2e-4", "save.every = 5", "named=[1, x]"):
        override(values, *parse_override(text))
    assert values == {
        "optimizer": {"lr": "2e-4"},
        "seed": 1,
        "save": {"every": 5},
        "named": [1, "x"],
    }
    with pytest.raises(UserError, match="override of 'seed.a': `seed` is not a section"):
        override(values, "seed.a", 1)
    with pytest.raises(UserError, match="override 'lr': expected key=value"):
        parse_override("lr")
    for value in ("[1", "2020-13-01", "9" * 5000, "{a: 1, a: 2}", "[" * 3000):
        with pytest.raises(UserError, match=r"override 'seed=.*' is not valid YAML"):
            parse_override(f"seed={value}")


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    """010 was octal, and so 8, as 08 was; 1:30 was 90."""
    file = tmp_path / "a.yaml"
    file.write_text("a: [010, -007, 1_000, 0x10, 0b11]\nb: 1:30\n")
    assert read_yaml(file) == {"a": [10, -7, 1000, 16, 3], "b": "1:30"}
    assert parse_override("seed=010") == ("seed", 10)


def test_an_override_leaves_an_alias_alone(tmp_path: Path) -> None:
    """YAML makes one object of `&name` and `*name`; the rows of b were those of a, too."""
    file = tmp_path / "a.yaml"
    file.write_text("a: &rows {table: x, read: {header: true}}\nb: *rows\nc: {<<: *rows}\nd:\n")
    values = read_yaml(file)
    for text in ("a.table=y", "c.read.header=false", "d.e=1"):
        override(values, *parse_override(text))
    assert values == {
        "a": {"table": "y", "read": {"header": True}},
        "b": {"table": "x", "read": {"header": True}},
        "c": {"table": "x", "read": {"header": False}},
        "d": {"e": 1},
    }


def test_a_name_that_yaml_reads_as_a_date() -> None:
    @dataclass(frozen=True)
    class Start:
        init_from: str

    with pytest.raises(UserError, match="expected text, got .2026-11-29.; YAML reads it as a date"):
        parse(Start, dict([parse_override("init_from=2026-11-29")]), "")


def test_a_mark_of_byte_order_is_no_mistake(tmp_path: Path) -> None:
    """Editors of Windows write one."""
    for name, read in (("a.yaml", read_yaml), ("a.json", read_json)):
        (tmp_path / name).write_text('{"a": 1}', encoding="utf-8-sig")
        assert read(tmp_path / name) == {"a": 1}


def test_differences_name_every_leaf() -> None:
    old = {"a": 1, "b": {"c": 2, "d": [3, {"e": 4}]}, "gone": 0, "same": [1]}
    new = {"a": 1, "b": {"c": 5, "d": [3, {"e": 6}]}, "new": 1, "same": [1]}
    found = ["b.c: 2 -> 5", "b.d[1].e: 4 -> 6", "gone: 0 -> None", "new: None -> 1"]
    assert differences(old, new) == found
    assert differences({"a": [1]}, {"a": [1, 2]}) == ["a: [1] -> [1, 2]"]
    assert differences({"a": [1] * 100}, {"a": [2] * 99}) == ["a: 100 items -> 99 items"]
    long = {"kind": "k" * 200, "source": "s"}
    assert differences({"tasks": {"a": long}}, {"tasks": {}}) == ["tasks.a: 2 keys -> None"]
    assert differences(new, new) == []
