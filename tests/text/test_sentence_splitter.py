"""Sentence splitting, by hand-written cases: | marks the start of a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from palm_ds.text.sentence_splitter import is_wrapped, sentence_starts
from palm_ds.text.word_features import word_flags
from palm_ds.text.words import split_words

ENGLISH = [
    "One sentence.| Another one.| A third",
    "Mr. Smith met Dr. Jones and Mrs. Brown.| They talked.",
    "He arrived on Jan. 5 at 5 p.m. and left.| She stayed.",
    "It opens at 5 p.m.| The doors are wide.",
    "J. R. R. Tolkien wrote it.| C. S. Lewis read it.",
    "He lives in the U.S. with his wife.| She likes it.",
    "He lives in the U.S.| She does not.",
    "The U.S. Army came.| It left.",
    "Washington, D.C. is a city.| It is large.",
    "It costs $3.50 or 1,000.25 yen.| Cheap!",
    "Pi is 3.14.| Two is 2.| Next.",
    '"Really?" she asked.| "Yes."| He nodded.',
    "“Stop!” he cried.| “Why?”| Nobody knew.",
    "He said, ‘Go.’| Then he left.",
    "He left (she stayed).| Then night fell.",
    "(He left.)| She stayed.",
    "He left [sic].| Done.",
    "Wait... what?| Oh... no.",
    "I see...| Yes, I do.",
    "What?!| No!!| Really.",
    "Apple Inc. grew.| It grew a lot.",
    "He works at Apple Inc.| The firm grew.",
    "Apples, pears, etc. are fruit.| They grow.",
    "Smith et al. (see below) agree.| Others do not.",
    "See Fig. 3 and No. 5, pp. 7-9.| Fine.",
    "He said no.| Then he left.",
    "Scott v. Sandford was decided.| It was wrong.",
    "e.g. this, i.e. that.| Fine.",
    "Yahoo! is a name.| It is odd.",
    "1. Introduction to it",
    "Visit example.com today.| Or v2.0 tomorrow.",
    "First.| 2024 was good.",
    "Title\n\n|Body begins here.| It goes on.",
    "Short line\n|Another short line",
    "- one\n|- two",
    "No end",
    "…and then?| Nothing.",
    "He came (Mr. Brown did not) and left.| Good.",
    "St. Paul's Cathedral is in London.| Go.",
    "It was Lt. Col. Grant.| He won.",
]
OTHERS = [
    "هل أنت هنا؟| نعم، أنا هنا.| حسنا",
    "یہ ایک جملہ ہے۔| یہ دوسرا ہے۔",
    "यह एक वाक्य है।| यह दूसरा है॥",
    "Սա նախադասություն է։| Սա էլ։",
    "¿Quién es?| ¡Nadie!| Bien.",
    "これは文です。|次の文です。",
]
CHINESE = [
    "我来了。|你走了！|他呢？|不知道",
    "他说：“你好。”|她笑了。",
    "“走！”，他说。|然后走了。",
    "他问：「你是谁？」|没人答。",
    "（真的。）|假的。",
    "然后……他走了。|天黑了。",
    "“我……”|她哭了。",
    "什么？！|不会吧！！|好。",
    "价格是3.5元。|便宜。",
    "他叫J.K.罗琳。|她写书。",
    "结束了.|开始吧!|好的",
    "第一条；第二条，第三条。|完",
    "我用GPU。|It is fast.| 很快！|Yes.",
    "标题\n|正文在这里。|完",
    "《红楼梦》。|《西游记》！",
    "他走了。』|她来了。",
    "他说“好。”。|完",
]


def split(text: str) -> str:
    """The text with | before every sentence but the first."""
    words = split_words(text)
    flags = np.array([word_flags(word) for word in words], np.int64)
    starts = sentence_starts(flags, wrapped=is_wrapped(text))
    out = ""
    for i, (word, start) in enumerate(zip(words, starts.tolist(), strict=True)):
        out += ("|" if start and i else "") + word
    return out


def expected(case: str) -> str:
    """Moves | before the white space that precedes it."""
    for space in ("\n\n", "\n"):
        case = case.replace(space + "|", "|" + space)
    return case


@pytest.mark.parametrize("case", ENGLISH + OTHERS + CHINESE)
def test_sentences(case: str) -> None:
    assert split(case.replace("|", "")) == expected(case)


WRAPPED = """This text is wrapped at a width that is quite usual, and so the
line ends here mean nothing at all to the person who reads these
words. It goes on for a while, and then a list follows after it:

* one item that is long enough to be wrapped at the same width
  as the rest
* another
"""


def test_wrapped_lines_are_not_sentences() -> None:
    assert is_wrapped(WRAPPED)
    assert split(WRAPPED).count("|") == 3


def test_long_and_short_lines_are_not_wrapped() -> None:
    assert not is_wrapped("A paragraph of text. " * 20 + "\n" + "Another one. " * 20)
    assert not is_wrapped("a\nb\nc")
    assert not is_wrapped("")


def test_nothing_has_no_sentences() -> None:
    assert sentence_starts(np.zeros(0, np.int64), wrapped=False).tolist() == []
