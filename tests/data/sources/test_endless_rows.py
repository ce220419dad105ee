"""Rows of readers without an end are found by their numbers."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader import TableSettings
from palm_ds.data.sources.endless_rows import EndlessRows
from palm_ds.data.stream.budgets import read_budget
from palm_ds.data.stream.item_order import EndlessOrder
from palm_ds.tasks.classification import Classification
from palm_ds.train.recipe.sections import SourceSettings
from tests.helpers import endless_readers
from tests.helpers.endless_readers import READ, row
from tests.helpers.text_tables import make_task, small_tokenizer

MODULE = endless_readers.__name__


def rows_of(reader: str, pass_examples: int = 16, **changes: Any) -> EndlessRows:
    READ.clear()
    return EndlessRows(
        reader=f"{MODULE}.{reader}",
        where="sources.x.reader",
        pass_examples=pass_examples,
        read=TableSettings(),
        tokenizer=small_tokenizer(),
        **changes,
    )


def texts(rows: EndlessRows, window: int) -> list[str]:
    return rows.source(window).column("text_a")


@pytest.mark.parametrize("reader", ["seeking", "plain", "Tuples"])
def test_windows_have_the_rows_of_their_numbers(reader: str) -> None:
    rows = rows_of(reader)
    for window in (0, 1, 2, 7, 1, 40, 0):
        first = 16 * window
        assert texts(rows, window) == [row(n)["text_a"] for n in range(first, first + 16)]
    assert rows.source(3).where(2) == "sources.x.reader[50]"


def test_a_reader_begins_where_it_is_told_or_is_read_again(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    texts(rows_of("seeking"), 40)
    assert READ[16:] == [("seeking", n) for n in range(640, 656)]  # after those of the sample
    assert not caplog.messages
    rows = rows_of("plain")
    texts(rows, 40)
    assert len(READ) == 656
    assert caplog.messages[0].startswith("sources.x.reader: 624 rows are read again and skipped")
    texts(rows, 40)
    assert len(READ) == 656  # windows are kept
    copied = pickle.loads(pickle.dumps(rows))
    assert texts(copied, 1) == texts(rows, 1)


def test_an_epoch_is_a_pass_and_items_are_in_order() -> None:
    task = make_task(Classification, "kind", labels=("c0", "c1"))
    order = EndlessOrder([task], rows_of("seeking", pass_examples=1500), 32)
    assert len(order) == 1500 and order.up_to(99) == 99
    n = np.array([2047, 3, 1024])
    found = {}
    for part in order.look_up(n):
        for place, item in zip(part.places, part.items[:, 0], strict=True):
            found[int(n[place])] = part.source.row(int(item))["text_a"]
    assert found == {number: row(number)["text_a"] for number in n.tolist()}


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("ended", "ended after 30 rows; it must not end"),
        ("changing", r"sources.x.reader\[40\]: label: unknown label .new"),
        ("other_columns", r"sources.x.reader\[16\]: from here on rows have the columns"),
        ("nothing", "nothing: expected rows, got 0"),
        ("needs", "missing a required argument: 'folder'; it is called without arguments"),
        ("READ", "'tests.helpers.endless_readers.READ' is neither a function nor a class"),
        ("absent", "sources.x.reader: tests.helpers.endless_readers has no 'absent'"),
    ],
)
def test_rows_that_cannot_be_used(reader: str, message: str) -> None:
    task = make_task(Classification, "kind", labels=("c0", "c1"))
    with pytest.raises(UserError, match=message):
        list(EndlessOrder([task], rows_of(reader), 32).look_up(np.arange(64)))


def test_each_task_group_checks_the_rows_for_its_own_tasks() -> None:
    rows = rows_of("seeking")
    first, other = (
        make_task(Classification, name, labels=("c0", last))
        for name, last in (("first", "c1"), ("other", "c9"))
    )
    list(EndlessOrder([first], rows, 32).look_up(np.arange(16)))
    with pytest.raises(UserError, match="label: unknown label .c1"):
        list(EndlessOrder([first, other], rows, 32).look_up(np.arange(16)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reader": "m.f"}, "`reader: module.function` and `pass_examples: N` go together"),
        ({"table": "a.tsv", "pass_examples": 3}, "go together"),
        ({"reader": "m.f", "table": "a.tsv"}, "give one of"),
        (
            {"reader": "m.f", "pass_examples": 3, "read": TableSettings(bad_rows="skip")},
            "read.bad_rows: a reader leaves out rows itself",
        ),
    ],
)
def test_mistakes_in_a_source(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SourceSettings(**values)


def test_passes_are_epochs() -> None:
    assert read_budget("3 passes", "x") == read_budget("3 epochs", "x")
    assert read_budget("1 pass", "x").unit == "epochs"
