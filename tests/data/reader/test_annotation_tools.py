"""What annotation tools export, by their documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table, TableSettings, open_table

TEXT = "Mary works"
META = {"_input_hash": 7, "_task_hash": -3, "_session_id": "ann", "_timestamp": 1700000000}
PERSON = {"start": 0, "end": 4, "type": "PER"}
PRODIGY_NER = {
    "text": TEXT,
    **META,
    "_view_id": "ner_manual",
    "tokens": [
        {"text": "Mary", "start": 0, "end": 4, "id": 0, "ws": True},
        {"text": "works", "start": 5, "end": 10, "id": 1, "ws": False},
    ],
    "spans": [{"start": 0, "end": 4, "token_start": 0, "token_end": 0, "label": "PER"}],
    "answer": "accept",
}
PRODIGY_CHOICE = {
    "text": TEXT,
    **META,
    "_view_id": "choice",
    "options": [{"id": "job", "text": "Jobs"}, {"id": "sport", "text": "Sports"}],
    "config": {"choice_style": "single"},
    "accept": ["job"],
    "answer": "accept",
}
PRODIGY_BINARY = {"text": TEXT, **META, "_view_id": "classification", "label": "job"}
SPAN = {
    "value": {"start": 0, "end": 4, "text": "Mary", "labels": ["PER"]},
    "from_name": "label",
    "to_name": "text",
    "type": "labels",
}
RELATION = {"from_id": "a", "to_id": "b", "type": "relation", "direction": "right"}

DOCCANO_RELATIONS = {
    "text": TEXT,
    "entities": [{"id": 3, "label": "PER", "start_offset": 0, "end_offset": 4}],
    "relations": [],
    "Comments": [],
}


def task_of(*results: Mapping[str, Any], cancelled: bool = False) -> dict[str, Any]:
    """A task of Label Studio's JSON export with one annotation."""
    annotation = {"id": 5, "completed_by": 1, "result": [*results], "was_cancelled": cancelled}
    return {"id": 9, "annotations": [annotation], "predictions": [], "data": {"text": TEXT}}


def choice(*names: str) -> dict[str, Any]:
    return {"value": {"choices": [*names]}, "from_name": "topic", "type": "choices"}


def table_of(folder: Path, *rows: Mapping[str, Any], **settings: Any) -> Table:
    path = folder / "export.json"
    path.write_text(json.dumps(rows))
    return open_table(str(path), TableSettings(**settings))


MULTIPLE = {"config": {"choice_style": "multiple"}, "accept": ["job", "sport"]}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (PRODIGY_NER, {"spans": [PERSON]}),
        ({k: v for k, v in PRODIGY_NER.items() if k != "spans"}, {"spans": []}),
        (PRODIGY_CHOICE, {"label": "job"}),
        (PRODIGY_CHOICE | MULTIPLE, {"label": ["job", "sport"]}),
        (PRODIGY_CHOICE | MULTIPLE | {"accept": []}, {"label": []}),
        (PRODIGY_BINARY | {"answer": "accept"}, {"label": "job"}),
        (task_of(SPAN, RELATION), {"spans": [PERSON]}),
        (task_of(), {"spans": []}),
        (task_of(choice("job")), {"label": "job"}),
        (task_of(choice("job", "sport")), {"label": ["job", "sport"]}),
        ({"text": TEXT, "label": [[0, 4, "PER"]], "Comments": []}, {"spans": [PERSON]}),
        ({"text": TEXT, "label": ["job"], "Comments": []}, {"label": ["job"]}),
        (DOCCANO_RELATIONS, {"spans": [PERSON]}),
        (DOCCANO_RELATIONS | {"entities": [[0, 4, "PER"]]}, {"spans": [PERSON]}),
        ({"text": TEXT, "entities": ["Mary"], "label": "job"}, {"label": "job"}),
    ],
)
def test_annotations_become_labels(
    row: Mapping[str, Any], found: Mapping[str, Any], tmp_path: Path
) -> None:
    table = table_of(tmp_path, row)
    read = {role: value for role, value in table[0].items() if role != "id"}
    assert read == {"text_a": TEXT, **found} and not table.notes
    assert Table.from_rows([row])[0] == table[0]


CANCELED = "text without an annotation, left out"


@pytest.mark.parametrize(
    ("row", "other", "note"),
    [
        (PRODIGY_NER, {"answer": "reject"}, "row whose `answer` is reject, left out"),
        (PRODIGY_NER, {"answer": "ignore"}, "row whose `answer` is ignore, left out"),
        (PRODIGY_CHOICE, {"answer": "reject", "accept": []}, "row whose `answer` is reject, left"),
        (task_of(SPAN), task_of(SPAN, cancelled=True), CANCELED),
        (task_of(SPAN), {"annotations": []}, CANCELED),
    ],
)
def test_what_was_not_accepted_is_no_label(
    row: dict[str, Any], other: dict[str, Any], note: str, tmp_path: Path
) -> None:
    """Rejected rows of Prodigy were trained on."""
    table = table_of(tmp_path, row, row | other)
    assert len(table) == 1 and table.notes[0].startswith(f"1 x {note}")
    assert table.notes[0].endswith("export.json, element 2")
    kept = table_of(tmp_path, row, row | other, missing_labels="keep")  # to predict
    (role,) = {"spans", "label"} & {*kept.columns}
    assert kept.column("text_a") == [TEXT, TEXT] and kept.column(role)[1] is None


def test_answers_can_be_the_classes(tmp_path: Path) -> None:
    rows = [PRODIGY_BINARY | {"answer": answer} for answer in ("accept", "reject")]
    table = table_of(tmp_path, *rows, columns={"label": "answer"})
    assert table.column("label") == ["accept", "reject"] and not table.notes


def test_two_annotators_of_a_text_are_told(tmp_path: Path) -> None:
    task = task_of(SPAN)
    two = task | {"annotations": task["annotations"] * 2}
    with pytest.raises(UserError, match="element 2: 2 annotations of one text; leave one of them"):
        table_of(tmp_path, task, two)
    with pytest.raises(UserError, match=r"rows\[0\]: 2 annotations"):
        Table.from_rows([two])
    assert len(table_of(tmp_path, task, two, bad_rows="skip")) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ann", "T1\tPER 0 4\tMary\n", "brat's annotations are not read; write a line of JSON"),
        ("a.tsv", "#FORMAT=WebAnno TSV 3.3\n\n1-1\t0-4\tMary\tPER\n", "export CoNLL 2002, and"),
        ("a.tsv", "Mary\tB-PER\nworks\tO\n", "`B-PER` is a tag, no name; format: conll reads"),
    ],
)
def test_other_exports_are_told_what_to_do(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        open_table(str(tmp_path / name))
