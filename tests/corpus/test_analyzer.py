"""Chinese entities of real texts, compared with labels: 422 sentences drawn at random.

The sentences are from other documents than the words that the weights were learned from; those of
news titles (fewclue_tnews) are from a source that no such word came from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from palm_ds.corpus.analyzer import DocumentAnalyzer
from palm_ds.corpus.options import TextOptions
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.text.train_tokenizer import train_tokenizer

SAMPLE = Path(__file__).with_name("chinese_names.tsv")


@cache
def documents(file: Path) -> list[str]:
    lines = file.read_text("utf-8").split("\n")
    rows = (json.loads(line) for line in lines if line)
    return [row["text"] if "text" in row else row["sentence"] for row in rows]


def labeled(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """The file, the sentence and its names, of each row of the sample."""
    for row in SAMPLE.read_text("utf-8").split("\n"):
        if not row or row.startswith("#"):
            continue
        file, line, start, end, digest, names = row.split("\t")
        text = documents(folder / file)[int(line) - 1][int(start) : int(end)]
        assert hashlib.sha256(text.encode()).hexdigest()[:8] == digest, f"{file}, line {line}"
        yield file, text, names.split()


def occurrences(text: str, names: list[str]) -> set[tuple[int, int]]:
    return {m.span() for name in names for m in re.finditer(re.escape(name), text)}


def test_three_of_four_marks_are_names(shared: Path) -> None:
    options = TextOptions(language="zh", collocations=False)
    analyzer = DocumentAnalyzer(load_tokenizer(shared / "data/ernie/vocab.txt"), options)
    right: dict[str, list[bool]] = defaultdict(list)
    of_file: dict[str, list[bool]] = defaultdict(list)
    found = total = 0
    for file, text, names in labeled(shared / "data"):
        known = occurrences(text, names)
        marks = {
            (a, b) for spans in analyzer.document("x", text).entities for a, b in spans.tolist()
        }
        for a, b in marks:
            right[text[a:b]].append((a, b) in known)
            of_file[file].append((a, b) in known)
        outer = {x for x in known if not any(inside(x, other) for other in known)}
        found += sum(any(mark == x or inside(mark, x) for mark in marks & known) for x in outer)
        total += len(outer)
    marks = [good for some in right.values() for good in some]
    assert len(marks) >= 300
    assert sum(marks) / len(marks) > 0.8  # 0.84; 0.59 with jieba's tags alone
    assert sum(all(some) for some in right.values()) / len(right) > 0.78  # of distinct words: 0.81
    assert found / total > 0.45  # 0.48 of all names
    assert min(sum(some) / len(some) for some in of_file.values()) > 0.7


def inside(span: tuple[int, int], other: tuple[int, int]) -> bool:
    return span != other and other[0] <= span[0] and span[1] <= other[1]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("自公告之日起三十日内，申请人应当向国务院提出。", ["国务院"]),
        ("他买了许多东西，心里很明白：道德不是普通的许可证。", []),
        ("孔明曰：曹操必败。桓公说：善。", ["曹操"]),  # no name with the next word in it
        ("英雄在城市里看太阳，哥哥在海关申报。", []),
        ("他先到杭州，再去日本，最后住在英国。", ["杭州", "日本", "英国"]),
        ("唐太宗读书，诸葛亮在成都。", ["唐太宗", "诸葛亮", "成都"]),
        ("The word 北京 is in it.", ["北京"]),
        ("一人走了。", []),
    ],
)
def test_sentences(text: str, names: list[str]) -> None:
    tokenizer = train_tokenizer([text] * 4, kind="wordpiece", vocab_size=200)
    document = DocumentAnalyzer(tokenizer, TextOptions(language="zh")).document("x", text)
    found = [text[a:b].strip() for spans in document.entities for a, b in spans.tolist()]
    assert found == names
