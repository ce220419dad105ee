"""Phrase mining: Chinese phrases over words, English phrases unaffected by Chinese text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from palm_ds.corpus.options import TextOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import Corpus, open_corpus

VERBS = ("研究", "讨论", "喜欢", "学习", "使用", "介绍", "了解", "批评")
OBJECTS = ("经济 发展", "数学", "历史", "城市", "市场", "语言", "法律", "音乐")


def chinese(count: int) -> list[str]:
    """Sentences in which 经济发展 is a phrase and 他 的, 我们 的 are frequent."""
    rng = np.random.default_rng(0)
    people = ("他", "我们", "老师", "学生")
    return [
        "".join(
            f"{rng.choice(people)}的朋友{rng.choice(VERBS)}{rng.choice(OBJECTS)}。".replace(" ", "")
            for _ in range(4)
        )
        for _ in range(count)
    ]


def english(count: int) -> list[str]:
    rng = np.random.default_rng(1)
    words = ("cat", "mat", "sat", "good", "big", "house", "machine learning", "of the", "river")
    return [" ".join(rng.choice(words, 12)) + "." for _ in range(count)]


def prepared(folder: Path, texts: Sequence[str], language: str, **more: object) -> Corpus:
    lines = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts)]
    folder.mkdir(parents=True)
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    text = TextOptions(language=language, **more)  # pyright: ignore[reportArgumentType]
    options = PrepareOptions(text=text, train="wordpiece", vocab_size=400)
    prepare(folder / "out", [str(folder / "in.jsonl")], options)
    return open_corpus(folder / "out")


def mined(corpus: Corpus) -> list[str]:
    lines = (corpus.path / "collocations.tsv").read_text("utf-8").splitlines()[1:]
    return [" ".join(line.split("\t")[:2]) for line in lines]


def phrases(corpus: Corpus, document: int) -> list[str]:
    """The annotated phrases of a document."""
    _, piece = corpus.document(document)
    tokens, mark = corpus.tokenizer().tokens(piece.ids), piece.annotations["phrase"]
    starts = np.flatnonzero(mark == 1)
    ends = [next((j for j in range(i + 1, len(mark)) if mark[j] != 2), len(mark)) for i in starts]
    return ["".join(tokens[i:j]) for i, j in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("language", ["zh", "mixed"])
def test_chinese_phrases_are_mined_over_words(language: str, tmp_path: Path) -> None:
    corpus = prepared(tmp_path / "zh", chinese(120), language)
    pairs = mined(corpus)
    assert "经济 发展" in pairs and not any("的" in pair or "他" in pair for pair in pairs)
    found = [phrase for number in range(len(corpus)) for phrase in phrases(corpus, number)]
    assert any(phrase.endswith("经济发展") for phrase in found)


def test_white_space_separates_chinese_words(tmp_path: Path) -> None:
    apart = [text.replace("经济发展", "经济 发展") for text in chinese(120)]
    assert "经济 发展" not in mined(prepared(tmp_path / "zh", apart, "zh"))


def test_traditional_words_are_mined_as_they_are_written_in_the_corpus(tmp_path: Path) -> None:
    pytest.importorskip("opencc")
    texts = [text.replace("经济发展", "經濟發展") for text in chinese(120)]
    assert "经济 发展" in mined(prepared(tmp_path / "zh", texts, "zh", simplify=True))


def test_chinese_text_does_not_change_english_phrases(tmp_path: Path) -> None:
    alone = prepared(tmp_path / "en", english(150), "en")
    mixed = prepared(tmp_path / "mixed", [*english(150), *chinese(120)], "mixed")
    pairs = [pair for pair in mined(mixed) if pair.isascii()]
    assert pairs == mined(alone) and "machine learning" in pairs
    for number in range(len(alone)):
        assert phrases(alone, number) == phrases(mixed, number)


def test_languages_do_not_get_each_others_phrases(tmp_path: Path) -> None:
    texts = [*english(150), *chinese(120)]
    assert all(pair.isascii() for pair in mined(prepared(tmp_path / "en", texts, "en")))
    assert not any(pair.isascii() for pair in mined(prepared(tmp_path / "zh", texts, "zh")))
