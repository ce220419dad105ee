"""Weights of Chinese names: those that are shipped are those that are learned from the words."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from palm_ds.text.chinese import WEIGHTS, is_name


@pytest.fixture(scope="module")
def learn(root: Path) -> ModuleType:
    file = root / "tools/chinese_names/learn.py"
    spec = importlib.util.spec_from_file_location("learn_chinese_names", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_weights_are_learned_from_the_words(learn: ModuleType) -> None:
    rows = [line.split("\t") for line in WEIGHTS.read_text("utf-8").split("\n")[1:] if line]
    shipped = {name: int(weight) for name, weight in rows}
    found = learn.learn(learn.read_words())
    for name in shipped.keys() | found.keys():  # exp differs between processors, in its last bit
        assert abs(shipped.get(name, 0) - found.get(name, 0)) <= learn.LEAST + 1, name


def test_words_that_were_not_learned_from(learn: ModuleType) -> None:
    words = learn.read_words()
    assert len(words) == len({word for word, _ in words}) > 3000
    precision, recall = learn.held_out(words, 5)
    assert precision > 0.75 and recall > 0.65


def test_the_labeled_words_are_learned(learn: ModuleType) -> None:
    import rjieba

    from palm_ds.corpus.analyzer import chinese_tagger

    tag = chinese_tagger()
    for word, label in learn.read_words():
        assert is_name(word, tag(word), known=rjieba.has_word(word)) == label, word
