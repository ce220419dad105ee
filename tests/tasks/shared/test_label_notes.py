"""Class names that are valid, but rarely what the user means, are remarked on."""

from __future__ import annotations

import pytest

from palm_ds.tasks.shared.label_notes import label_notes

ODD = {
    "decimals": ([f"{i / 7:.3f}" for i in range(12)], "looks like `kind: regression`"),
    "case": (["Yes", "yes", "no"], "'Yes' and 'yes' look alike, but are different classes"),
    "invisible": (["y", "y\u200b", "n"], r"'y' and 'y\u200b' look alike"),
    "spellings": (["1", "1.00", "0"], "'1' and '1.00' look alike"),
    "numbers": (["1", "1.0", "0"], "'1' and '1.0' are one class, as they are one number; if"),
    "width": (["Ａ", "A"], "'A' and 'Ａ' look alike"),
    "numbers and words": (["1", "2", "x"], "numbers ('1', '2') and words ('x') are both classes"),
    "missing": (["a", "b", "NaN"], "'NaN' may mean that the label is missing"),
    "whole numbers as floats": (["0.0", "1.0"], "'0.0', '1.0' are whole numbers, which pandas"),
    "quoted": (["a", '"b"'], "quotation marks are part of '\"b\"'"),
    "lists in cells": (["['film'", "'long']", "[]"], "brackets are part of "),
    "one a row": ([f"id{i}" for i in range(12)], "12 classes in 12 rows; is this the right"),
}
USUAL = {
    "words": ["bad", "fair", "good"],
    "numbers": ["0", "1", "2"],
    "stars with halves": ["0.5", "1", "1.5", "2"],
    "signs": ["+", "-", "?"],
    "many": [f"intent_{i}" for i in range(77)],
    "numbers of many": [str(i) for i in range(77)],
}


@pytest.mark.parametrize("case", ODD)
def test_odd_names_are_remarked_on(case: str) -> None:
    names, note = ODD[case]
    rows = len(names) if case == "one a row" else 500
    (found,) = label_notes(names, rows=rows)
    assert note in found and "\n" not in found


@pytest.mark.parametrize("case", USUAL)
def test_usual_names_are_not(case: str) -> None:
    assert label_notes(USUAL[case], rows=500) == []


def test_a_name_that_is_no_number_hides_no_other() -> None:
    notes = label_notes(["+", "+.0", "1", "1.0"], rows=100)
    assert any(note.startswith("'1' and '1.0' are one class") for note in notes)
