"""Which short lines are headings and, more importantly, which are not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from palm_ds.corpus.add_annotation import add_annotations
from palm_ds.corpus.analyzer import DocumentAnalyzer
from palm_ds.corpus.annotations import heading, sentence
from palm_ds.corpus.options import InputOptions, TextOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import open_corpus
from palm_ds.text.headings import find_headings
from palm_ds.text.tokenizer import SPECIALS, wordpiece

PROSE = "The mill was built of brick in the year 1819, and has worked ever since without a pause."
HI = "यह चक्की सन् अठारह सौ उन्नीस में ईंटों से बनाई गई थी और तब से बिना रुके लगातार काम करती आ रही है।"
ZH = "这座磨坊建于一八一九年，用砖砌成，从那时起一直运转，从未停歇，直到今天仍然在磨面粉。"


def headings(text: str) -> list[str]:
    return [text[first:last] for first, last in find_headings(text)]


FOUND = {
    "between paragraphs": (f"{PROSE}\n\nAs built\n\n{PROSE}", ["As built"]),
    "at the beginning": (f"Route description\n\n{PROSE}", ["Route description"]),
    "two in a row": (f"{PROSE}\n\nHistory\n\nEarly years\n\n{PROSE}", ["History", "Early years"]),
    "numbered": (f"1. Introduction\n\n{PROSE}\n\n2.3 Results\n\n{PROSE}", None),
    "an abbreviation": (f"{PROSE}\n\nU.S. Highway 11\n\n{PROSE}", ["U.S. Highway 11"]),
    "markdown": (f"## The mill (1819)\n\n{PROSE}", ["## The mill (1819)"]),
    "one line a paragraph": (f"The mill\n{PROSE * 2}\nToday\n{PROSE * 2}", ["The mill", "Today"]),
    "Hindi": (f"{HI}\n\nचक्की की कहानी\n\n{HI}", ["चक्की की कहानी"]),
    "Chinese": (
        f"第一章 总则\n\n{ZH}\n\n军事设施的保护\n\n{ZH}",
        ["第一章 总则", "军事设施的保护"],
    ),
    "Chinese lines": (f"法律责任\n{ZH * 2}\n附则\n{ZH * 2}", ["法律责任", "附则"]),
    "blank lines with spaces": (f"Today\n  \n{PROSE}", ["Today"]),
}
NONE = {
    "nothing follows": f"{PROSE}\n\nThe end",
    "a sentence": f"{PROSE}\n\nHe rang the bell.\n\n{PROSE}",
    "a question": f"{PROSE}\n\nWhy not\n\n?\n\n{PROSE}",
    "a list's introduction": f"{PROSE}\n\nIt has three parts:\n\n{PROSE}",
    "list": f"{PROSE}\n\nIt has:\n\nOne wheel\n\nTwo stones\n\nThree floors\n\n{PROSE}",
    "two list items": f"{PROSE} It has:\n\nOne wheel\n\nTwo stones\n\n{PROSE}",
    "verse": "\n\n".join(
        [PROSE, "Tyger burning", "In the night", "What hand", "Could frame", PROSE]
    ),
    "verse in lines": f"{PROSE}\n\nTyger Tyger burning\nIn the forests\n\n{PROSE}",
    "too long": f"{PROSE}\n\n{'Word and ' * 6}word\n\n{PROSE}",
    "in lower case": f"{PROSE}\n\nwearing bland clothes\n\n{PROSE}",
    "a cut sentence": f"{PROSE} He then\n\nThe word went\n\n{PROSE}",
    "speech": f"{PROSE}\n\n“Yes,” she said\n\n{PROSE}",
    "a reference": f"{PROSE}\n\nMcLeod, S. (2011). Anterograde amnesia. http://simply.org/a\n\n{PROSE}",
    "two sentences": f"{PROSE}\n\nThe jaw drops. Is this so\n\n{PROSE}",
    "a rule": f"{PROSE}\n\n* * *\n\n{PROSE}",
    "short prose after it": f"{PROSE}\n\nArticles\n\nThey are here.",
    "a formula": f"{PROSE}\n\nx = 3\n\n{PROSE}",
    "long Chinese": f"{ZH}\n\n第一条为了加快国土绿化践行绿水青山就是金山银山理念保护培育\n\n{ZH}",
    "a Chinese clause": f"{ZH}\n\n最后，患者患病的概率为\n\n{ZH}",
    "Chinese items": f"{ZH}\n\n（一）财产分割；\n\n（二）招标投标；\n\n{ZH}",
    "wrapped lines": "\n".join(["Short line", *[PROSE[:70]] * 5]),
    "empty": "",
}


@pytest.mark.parametrize("case", FOUND)
def test_headings(case: str) -> None:
    text, wanted = FOUND[case]
    if wanted is None:
        wanted = [line for line in text.split("\n\n") if line != PROSE]
    assert headings(text) == wanted


@pytest.mark.parametrize("case", NONE)
def test_lines_that_are_not_headings(case: str) -> None:
    assert headings(NONE[case]) == []


BODY = "The mill was built of brick in 1819. Now it stands today as it was, of brick. The mill now."
WORDS = re.findall(r"\w+|\S", f"{BODY} Dr. No? Who!".lower())
TOKENIZER = wordpiece([*SPECIALS, *dict.fromkeys(WORDS)], lower=True)


def test_a_heading_is_a_separate_sentence() -> None:
    document = DocumentAnalyzer(TOKENIZER, TextOptions()).document(
        "x", f"{BODY}\n\nThe mill now\n\n{BODY}"
    )
    values, starts = heading(document), np.flatnonzero(sentence(document))
    at = np.flatnonzero(values)
    assert values[at].tolist() == [1, 2, 2]
    assert at[0] in starts and at[-1] + 1 in starts and not set(at[1:]) & set(starts)


def titled(tmp_path: Path, title: object, text: str = BODY, **more):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *dict.fromkeys(WORDS)]))
    (tmp_path / "a.jsonl").write_text(json.dumps({"title": title, "text": text}) + "\n")
    options = PrepareOptions(
        tokenizer=str(tmp_path / "vocab.txt"), input=InputOptions(title_field="title"), **more
    )
    prepare(tmp_path / "c", [str(tmp_path / "a.jsonl")], options)
    return open_corpus(tmp_path / "c")


def test_a_title_is_always_one_sentence(tmp_path: Path) -> None:
    corpus = titled(tmp_path, "Dr. No?\n Who! Now")
    assert "heading" in corpus.annotations
    _, piece = corpus.document(0)
    tokens = corpus.tokenizer().tokens(piece.ids)
    assert tokens[:7] == ["dr", ".", "no", "?", "who", "!", "now"]
    assert piece.annotations["heading"].tolist() == [1, *[2] * 6, *[0] * (len(piece) - 7)]
    assert np.flatnonzero(piece.annotations["sentence"])[:2].tolist() == [0, 7]
    assert corpus.manifest.sentences == 4


def test_a_text_under_a_title_that_begins_in_lower_case(tmp_path: Path) -> None:
    corpus = titled(tmp_path, "The mill", f"as it was. {BODY}")
    starts = np.flatnonzero(corpus.document(0)[1].annotations["sentence"])
    assert starts[:2].tolist() == [0, 2]


@pytest.mark.parametrize("title", [None, "", "  "])
def test_a_record_may_have_no_title(tmp_path: Path, title: str | None) -> None:
    corpus = titled(tmp_path, title)
    assert not corpus.document(0)[1].annotations["heading"].any()


def test_a_title_without_tokens_is_not_a_heading(tmp_path: Path) -> None:
    corpus = titled(tmp_path, "\u0007")
    assert not corpus.document(0)[1].annotations["heading"].any()


def test_headings_are_added_to_an_existing_corpus(tmp_path: Path) -> None:
    text = f"{BODY}\n\nThe mill\n\n{BODY}"
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *dict.fromkeys(WORDS)]))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    inputs, tokenizer = [str(tmp_path / "a.jsonl")], str(tmp_path / "vocab.txt")
    prepare(tmp_path / "later", inputs, PrepareOptions(tokenizer=tokenizer))
    add_annotations(tmp_path / "later", inputs, ["heading"])
    prepare(
        tmp_path / "once", inputs, PrepareOptions(tokenizer=tokenizer, annotations=("heading",))
    )
    later, once = (open_corpus(tmp_path / name).document(0)[1] for name in ("later", "once"))
    assert later.annotations["heading"].tolist() == once.annotations["heading"].tolist()
    assert later.annotations["heading"].sum() == 3


def test_real_texts_have_few_headings(shared: Path) -> None:
    """None in a list of references, few in novels, and the chapters of a law book."""
    counts = {}
    for name in ("en/openstax", "en/eltec_eng", "zh/niutrans_classical"):
        counts[name] = [0, 0]
        with (shared / f"data/corpus/{name}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                counts[name][0] += text.count("\n\n")
                counts[name][1] += len(find_headings(text))
    for name, most in (("en/openstax", 0.002), ("en/eltec_eng", 0.0005)):
        blocks, found = counts[name]
        assert blocks > 3000 and found / blocks < most
    assert counts["zh/niutrans_classical"][1] > 500
