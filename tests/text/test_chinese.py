"""Simplified Chinese, character by character."""

from __future__ import annotations

from palm_ds.text import chinese
from palm_ds.text.chinese import simplify_in_place


def test_simplification_by_words_keeps_positions() -> None:
    assert simplify_in_place("乾隆皇帝 and 乾淨的頭髮 A") == "乾隆皇帝 and 干净的头发 A"


def test_a_word_that_would_grow_is_converted_character_by_character(monkeypatch) -> None:
    found = {"軟體": "软件件", "軟": "软", "體": "体体"}
    monkeypatch.setattr(chinese, "find_simplifier", lambda: lambda text: found.get(text, text))
    assert simplify_in_place("軟體") == "软體"
