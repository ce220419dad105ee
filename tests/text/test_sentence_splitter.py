"""Sentence splitting, by hand-written cases: | marks the start of a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
    "है।|यह दूसरा है।",  # no space
    "هذا كتاب.| «نعم.»| ثم ذهب؟|لا",
    "ሰላም።|ደህና ነህ፧|አዎ",
    "သွားတယ်။|လာတယ်၊ စားတယ်။",
    "Բարեւ։|Ինչպե՞ս ես։",
    "ខ្ញុំទៅ។|គាត់ទៅ",
    "« Viens. »| Il partit.",
    "«\u202fViens\u202f!\u202f»| Il partit\u202f; elle\u202f: non.",
    "Er ging.| »Halt.«| Sie blieb.",
    "„Halt.“| Sie blieb.| „Warum?“| Er schwieg.",
    "Quoi\u00a0?| Rien\u00a0!| Bon.",
]
JAPANESE = [
    "これは文である．|次に，値は３．１４である．|終わり",
    "半角です｡|次です｡",
    "「行く！」と言った。|「本当？」|彼は黙った。",
    "そうだ。|\u3000次の文！|\u3000終わり",
    "「はい。」|とても静かだ。",
    "彼はA.|次",
]
OTHER = [
    "הוא גר כאן.| הדר ד. כהן.| היא לא.",
    "قال د. محمد نعم.| ثم ذهب.",
    "Mieszka na ulicy Długiej.| Tam jest p. Nowak.",
]
SENTENCES = Path(__file__).with_name("sentences.txt")
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


def split(text: str, language: str = "mixed") -> str:
    """The text with | before every sentence but the first."""
    words = split_words(text)
    flags = np.array([word_flags(word, language) for word in words], np.int64)
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


@pytest.mark.parametrize(
    ("language", "case"), [*(("ja", x) for x in JAPANESE), *(("other", x) for x in OTHER)]
)
def test_sentences_of_languages(language: str, case: str) -> None:
    assert split(case.replace("|", ""), language) == case


def passages() -> Iterator[tuple[str, str]]:
    """The language and the text of each line of sentences.txt."""
    language = ""
    for line in SENTENCES.read_text("utf-8").splitlines():
        if line.startswith("["):
            language = line.strip("[]")
        elif not line.startswith("#"):
            yield language, line


def places(marked: str) -> set[int]:
    return set(np.cumsum([len(part) for part in marked.split("|")])[:-1].tolist())


@pytest.mark.parametrize("language", ["de", "es", "fr", "it", "nl", "pt", "ru"])
def test_sentences_of_passages(language: str) -> None:
    """With English abbreviations, precision is 0.65 to 0.88 and recall 0.93 to 1."""
    found = right = wanted = 0
    for _, marked in (each for each in passages() if each[0] == language):
        ours, theirs = places(split(marked.replace("|", ""), language)), places(marked)
        found, right, wanted = found + len(ours), right + len(ours & theirs), wanted + len(theirs)
    assert wanted >= 40
    assert right / found > 0.95 and right / wanted > 0.95


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
