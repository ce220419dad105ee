"""Columns get roles by name, alias or settings; their values are preserved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.data.reader import ROLES, Table, TableSettings, open_table
from palm_ds.data.reader.cell_values import _PARSERS
from palm_ds.data.reader.column_roles import ALIASES, TEXTS
from palm_ds.data.reader.options import columns_of


def table_of(folder: Path, *rows: dict[str, Any], **settings: Any) -> Table:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_table(str(path), parse(TableSettings, settings, "sources.x"))


def test_every_role_is_known_everywhere() -> None:
    assert set(_PARSERS) == set(ROLES) and set(ALIASES) <= set(ROLES)


@pytest.mark.parametrize("names", TEXTS, ids=" ".join)
def test_texts_by_alias(names: tuple[str, ...], tmp_path: Path) -> None:
    row = {name: f"<{name}>" for name in names} | {"other": 1}
    expected = dict(zip(("text_a", "text_b"), row.values(), strict=False))
    assert table_of(tmp_path, row)[0] == {k: v for k, v in expected.items() if v != 1}


@pytest.mark.parametrize(
    "written",
    [
        {"label": [[0, 4, "PER"]]},
        {"labels": [{"start": 0, "end": 4, "text": "John", "labels": ["PER"]}]},
        {"entities": [{"id": 1, "label": "PER", "start_offset": 0, "end_offset": 4}]},
        {"spans": [{"start": 0, "end": 4, "token_start": 0, "token_end": 0, "label": "PER"}]},
    ],
    ids=["Doccano", "Label Studio", "Doccano with relations", "Prodigy"],
)
def test_spans_as_annotation_tools_write_them(written: dict[str, Any], tmp_path: Path) -> None:
    columns = {"spans": "entities"} if "entities" in written else {}
    nothing = {"text": "He", **dict.fromkeys(written, [])}
    table = table_of(tmp_path, nothing, {"text": "John won", **written}, columns=columns)
    assert table.column("spans") == [[], [{"start": 0, "end": 4, "type": "PER"}]]


@pytest.mark.parametrize(
    ("cells", "label"),
    [
        ((1, 0, "1"), ["toxic", "threat"]),
        ((0.0, 1.0, False), ["insult"]),
        (("FALSE", "0", "0.0"), []),
        (
            (None, "", None),
            r"label is null; `read: \{drop: \{label: \[null\]\}\}` leaves such rows out",
        ),
        ((1, "", 0), "insult is empty, not 0 or 1, as a column of a class is"),
        ((0, 1, -1), "threat is -1, not 0 or 1, as a column of a class is"),
    ],
)
def test_a_column_for_each_class(cells: tuple[Any, ...], label: Any, tmp_path: Path) -> None:
    """As in Kaggle's toxic comments."""
    names = ("toxic", "insult", "threat")
    row = {"text": "a", **dict(zip(names, cells, strict=True))}
    columns = columns_of([f"label={name}" for name in names])
    if isinstance(label, list):
        assert table_of(tmp_path, row, columns=columns).column("label") == [label]
        return
    with pytest.raises(UserError, match=f":1: {label}$"):
        table_of(tmp_path, row, columns=columns)
    kept = {"columns": columns, "missing_labels": "keep", "bad_rows": "skip"}
    table = table_of(tmp_path, row, {"text": "b"} | dict.fromkeys(names, 1), **kept)
    assert table.column("label")[-1] == [*names]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a", "title": "b"}, {"text_a": "a"}),
        ({"text": "a", "text_a": "b", "sentence": "c"}, {"text_a": "b"}),
        ({"text": "a", "label": 1, "label_desc": "x"}, {"text_a": "a", "label": "1"}),
        ({"premise": "a", "hypothesis": "b", "idx": 3}, {"text_a": "a", "text_b": "b", "id": 3}),
        ({"sentence1": "a", "text_b": "b"}, {"text_b": "b"}),
        ({"text": "a", "labels": ["x", 2]}, {"text_a": "a", "label": ["x", "2"]}),
        ({"text": "a", "labels": []}, {"text_a": "a", "label": []}),
        ({"text": "a", "query_id": 7}, {"text_a": "a", "qid": 7}),
        ({"question": "a", "options": ["b", "c"]}, {"question": "a", "choices": ["b", "c"]}),
        ({"tokens": ["a"], "ner_tags": [3]}, {"tokens": ["a"], "tags": ["3"]}),
        ({"src": "a", "tgt": "b"}, {"source": "a", "target": "b"}),
        ({"source": "a"}, {"source": "a"}),
        ({"text": "a", "source": 3}, {"text_a": "a"}),
        ({"question": "a", "source": None}, {"question": "a"}),
        ({"text": "a", "target": {"span": 2}}, {"text_a": "a"}),
        ({"label": 1, "tgt": 2}, {"label": "1"}),
        ({"turns": ["a"], "target": "b"}, {"turns": ["a"], "target": "b"}),
        ({"text": "a", "turns": 3, "target": 1}, {"text_a": "a"}),
    ],
)
def test_the_precedence_of_columns(
    row: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    assert table_of(tmp_path, row)[0] == expected


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ({"two": 1.0, "three": 0.3}, "label"),
        ({"city": {"a": [[0, 0]]}}, "spans"),
        ({}, "spans"),
    ],
)
def test_the_first_object_with_content_says_what_labels_are(
    label: dict[str, Any], role: str, tmp_path: Path
) -> None:
    """Worths of classes or spans; an empty one may be either."""
    given = [{"text_a": "a", "label": {}}, {"text_a": "a", "label": label}]
    table = table_of(tmp_path, *given)
    assert table.columns == ("text_a", role)
    assert Table.from_rows(given).columns == table.columns
    assert table.column(role)[0] == ({} if role == "label" else [])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text_a": "q"}, {"text_a": "x", "label": "1"}),
        ({"text_a": "q", "label": ""}, {"text_a": "x"}),
        ({"text_a": "d.e.f", "label": "d.n"}, {"text_a": "y", "label": "2"}),
        ({"text_a": "g.h"}, {"text_a": "dotted", "label": "1"}),
        ({"choices": ["q", "d.e.f"]}, {"label": "1", "choices": ["x", "y"]}),
        ({"text_a": ["q", "d.e.f"]}, {"text_a": "x y", "label": "1"}),
        ({"qid": "q", "text_a": "q"}, {"text_a": "x", "qid": "x", "label": "1"}),
        ({"text_b": "label"}, {"text_b": "1"}),
    ],
)
def test_columns_follow_the_settings(
    columns: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    row = {"q": "x", "d": {"e": {"f": "y"}, "n": 2}, "g.h": "dotted", "label": 1}
    assert table_of(tmp_path, row, columns=columns)[0] == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, "1"),
        (1.0, "1.0"),
        (True, "true"),
        (False, "false"),
        (" x\t", "x"),
        (10**400, "1" + "0" * 400),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        ("中 性", "中 性"),
    ],
)
def test_labels_become_text_without_loss(value: Any, expected: str, tmp_path: Path) -> None:
    assert table_of(tmp_path, {"text": "a", "label": value})[0]["label"] == expected


def test_numbers_become_text_in_text_columns(tmp_path: Path) -> None:
    row = {"text_a": 13, "text_b": 1.5, "id": 4, "qid": " x "}
    assert table_of(tmp_path, row)[0] == {"text_a": "13", "text_b": "1.5", "id": 4, "qid": "x"}


def test_spaces_are_stripped_on_request(tmp_path: Path) -> None:
    row = {"text_a": "光 荣 ", "text_b": " a b", "label": "x y", "context": "c d"}
    table = table_of(tmp_path, row, strip_spaces=True)
    assert table[0] == {"text_a": "光荣", "text_b": "ab", "label": "x y", "context": "c d"}


def test_spaces_of_a_text_that_a_scene_graph_refers_to_are_not_stripped(tmp_path: Path) -> None:
    row = {"text_a": "a dog", "scene_graph": {"objects": [[2, 5]]}}
    with pytest.raises(UserError, match="strip_spaces would shift the places of scene_graph"):
        table_of(tmp_path, row, strip_spaces=True, columns={"scene_graph": "scene_graph"})


def test_nothing_is_left_between_stripped_texts_that_are_joined(tmp_path: Path) -> None:
    row = {"first": "光 荣", "second": " 的 ", "third": ""}
    columns = {"text_a": ["first", "second", "third"]}
    assert table_of(tmp_path, row, strip_spaces=True, columns=columns)[0]["text_a"] == "光荣的"


def test_texts_beside_images_are_simplified_and_stripped_as_others(tmp_path: Path) -> None:
    row = {"text_a": "貓 咪", "positives": ["漢 語", "貓"], "object_tags": "貓 漢", "image": "1"}
    columns = {name: name for name in ("positives", "object_tags", "image")}
    table = table_of(tmp_path, row, simplify=True, strip_spaces=True, columns=columns)
    assert table[0] == {
        "text_a": "猫咪",
        "positives": ["汉语", "猫"],
        "object_tags": "猫 汉",
        "image": "1",
    }


def test_texts_are_unchanged(tmp_path: Path) -> None:
    text = " a\u00a0 b\u2028 c\t"
    assert table_of(tmp_path, {"text_a": text})[0]["text_a"] == text


@pytest.mark.parametrize(
    ("drop", "left", "notes"),
    [
        ({"label": ["-"]}, [1, 2.0, None, True], ["1 x row with label '-', dropped"]),
        ({"label": [1, None]}, ["-", 2.0, True], ["1 x row with label '1', dropped"]),
        ({"label": [2.0, True]}, ["-", 1, None], ["1 x row with label '2', dropped"]),
        ({"label": []}, ["-", 1, 2.0, None, True], []),
        ({"text_b": ["a"]}, ["-", 1, 2.0, None, True], []),
    ],
)
def test_rows_are_dropped_and_counted(
    drop: dict[str, Any], left: list[Any], notes: list[str], tmp_path: Path
) -> None:
    rows = [{"text_a": "a", "label": value} for value in ("-", 1, 2.0, None, True)]
    table = table_of(tmp_path, *rows, drop=drop, bad_rows="skip")
    expected = [{True: "true"}.get(x, str(x)) if x is True else str(x) for x in left]
    assert table.column("label") == [x for x in expected if x != "None"]
    assert [note.split(";")[0] for note in table.notes][: len(notes)] == notes
    skipped = [note for note in table.notes if "bad row" in note]
    assert len(skipped) == (None in left)


def test_truths_are_dropped_in_every_spelling(tmp_path: Path) -> None:
    rows = [{"text_a": "a", "label": value} for value in ("True", True, "TRUE", "false", "Truth")]
    table = table_of(tmp_path, *rows, drop={"label": [True]})
    assert table.column("label") == ["false", "Truth"]


def test_empty_texts_are_kept_and_noted(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"text_a": "a"}, {"text_a": ""}, {"text_a": " "})
    assert len(table) == 3
    assert table.notes == (f"2 x empty text_a; the first: {tmp_path / 't.jsonl'}:2",)


def test_a_missing_column(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"text_a": "a"})
    with pytest.raises(UserError, match="no column has the role label; the roles are text_a$"):
        table.column("label")


def test_settings_from_a_recipe() -> None:
    given = {"columns": {"text_a": 0, "choices": ["a", 1]}, "drop": {"label": ["-", 0, None]}}
    settings = parse(TableSettings, given, "sources.x")
    assert settings.columns == {"text_a": 0, "choices": ["a", 1]}
    assert settings.drop == {"label": ["-", 0, None]}
    with pytest.raises(UserError, match=r"sources.x.colums: unknown key; did you mean"):
        parse(TableSettings, {"colums": {}}, "sources.x")


def test_further_labels_of_other_tasks_on_the_same_texts(tmp_path) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\tentails\tnear\nx\ty\tyes\t3.5\n")
    columns = {"text_a": "a", "text_b": "b", "label": "entails", "label_near": "near"}
    table = open_table(str(tmp_path / "pairs.tsv"), TableSettings(columns=columns))
    assert table[0] == {"text_a": "x", "text_b": "y", "label": "yes", "label_near": "3.5"}
    with pytest.raises(UserError, match="columns.lable_near: unknown role"):
        TableSettings(columns={"lable_near": "near"})
