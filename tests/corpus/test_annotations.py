"""Annotations match the text: tokens are decoded and compared with words and spans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.corpus.analyzer import DocumentAnalyzer
from palm_ds.corpus.annotations import BUILT_IN, Document, apply_annotation, find_annotation
from palm_ds.corpus.options import TextOptions
from palm_ds.text.tokenizer import SPECIALS, Tokenizer, load_tokenizer, wordpiece
from palm_ds.text.train_tokenizer import train_tokenizer
from tests.helpers.ernie_tiny import write_release

TEXT = (
    "The New York Times wrote about machine learning. Unbelievably, John Smith’s 3.14 was right! "
    "我们在北京学习机器学习。小明毕业于中国科学院。"
)
TRAINING = [TEXT, "the new york times machine learning state state art was right"] * 4


@pytest.fixture(scope="module", params=["wordpiece", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(TRAINING, kind=request.param, vocab_size=170, lower=True)


@pytest.fixture(scope="module")
def document(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Document:
    lexicon = tmp_path_factory.mktemp("lexicon") / "phrases.txt"
    lexicon.write_text("机器学习\n", "utf-8")
    analyzer = DocumentAnalyzer(
        tokenizer,
        TextOptions(lexicon_phrase=(str(lexicon),)),
        collocations=[("machine", "learning")],
    )
    return analyzer.document("x", TEXT)


def pieces(document: Document, first: np.ndarray) -> list[str]:
    """The text between the tokens where `first` is 1, without white space around it."""
    starts = document.token_starts[np.flatnonzero(first)].tolist()
    text = document.text
    return [text[a:b].strip() for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def spans(document: Document, values: np.ndarray) -> list[str]:
    """The text of every span of an annotation with values 0, 1 and 2."""
    ends = [*document.token_starts[1:].tolist(), len(document.text)]
    out: list[str] = []
    for i, value in enumerate(values.tolist()):
        piece = document.text[document.token_starts[i] : ends[i]]
        if value == 1:
            out.append(piece)
        elif value == 2:
            out[-1] += piece
    return [piece.strip() for piece in out]


def annotation(name: str, document: Document) -> np.ndarray:
    return apply_annotation(name, BUILT_IN[name], document)


def test_sentences(document: Document) -> None:
    assert pieces(document, annotation("sentence", document)) == [
        "The New York Times wrote about machine learning.",
        "Unbelievably, John Smith’s 3.14 was right!",
        "我们在北京学习机器学习。",
        "小明毕业于中国科学院。",
    ]


def test_words(document: Document) -> None:
    found = pieces(document, annotation("word", document))
    assert found[:9] == [
        "The",
        "New",
        "York",
        "Times",
        "wrote",
        "about",
        "machine",
        "learning",
        ".",
    ]
    assert found[9:18] == ["Unbelievably", ",", "John", "Smith", "’s", "3.14", "was", "right", "!"]
    assert found[18:21] == ["我们", "在", "北京"]


def test_phrases(document: Document) -> None:
    assert spans(document, annotation("phrase", document)) == ["machine learning", "机器学习"]


def test_entities(document: Document) -> None:
    found = spans(document, annotation("entity", document))
    assert found == ["New York Times", "John Smith", "北京", "小明", "中国科学院"]


def test_capitals(document: Document) -> None:
    values = annotation("capital", document)
    words = annotation("word", document)
    found = pieces(document, words)
    of_word = values[words == 1].tolist()
    assert [w for w, c in zip(found, of_word, strict=True) if c] == [
        *("The", "New", "York", "Times", "Unbelievably", "John", "Smith")
    ]
    for start in np.flatnonzero(words):  # all tokens of a word have the same value
        end = next((i for i in range(start + 1, len(words)) if words[i]), len(words))
        assert len(set(values[start:end].tolist())) == 1


def test_earlier_groups_of_spans_take_precedence(tokenizer: Tokenizer) -> None:
    document = DocumentAnalyzer(tokenizer, TextOptions(language="en")).document(
        "x", "the new york times"
    )
    a, b = np.array([[4, 12]]), np.array([[0, 7], [12, 18]])
    assert spans(document, document.first_and_inside([a, b])) == ["new york", "times"]
    overlapping = np.array([[0, 3], [3, 12], [7, 12]])
    assert spans(document, document.first_and_inside([overlapping])) == ["the", "new york"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "The ",
                "New York ",
                "cat. ",
                "Dr. ",
                "北京",
                "大学。",
                "他",
                "3.5",
                "\n\n",
                "“",
                "”! ",
                "x",
            ]
        ),
        min_size=1,
        max_size=25,
    )
)
def test_annotations_are_well_formed(parts: list[str]) -> None:
    text = "".join(parts)
    document = ANALYZER.document("x", text)
    if not len(document):
        return
    values_of = {
        name: apply_annotation(name, function, document) for name, function in BUILT_IN.items()
    }
    assert values_of["sentence"][0] == 2 and values_of["word"][0] == 1
    assert set(values_of["capital"].tolist()) <= {0, 1}
    assert set(values_of["sentence"].tolist()) <= {0, 1, 2}
    sentence_starts = values_of["sentence"] > 0
    assert (values_of["word"][sentence_starts] == 1).all()  # a sentence begins with a word
    for name in ("phrase", "entity", "heading"):
        values = values_of[name]
        inside = np.flatnonzero(values == 2)
        assert (inside > 0).all() and (values[inside - 1] > 0).all()  # a span has a first token
        assert not (values_of["sentence"][inside]).any()  # and lies in one sentence


ANALYZER = DocumentAnalyzer(
    train_tokenizer(TRAINING, kind="wordpiece", vocab_size=170, lower=True), TextOptions()
)


def test_simplified(tokenizer: Tokenizer) -> None:
    analyzer = DocumentAnalyzer(tokenizer, TextOptions(simplify=True, language="zh"))
    assert analyzer.document("x", "我們學習").text == "我们学习"


def test_words_are_those_of_the_tokenizers_segmenter(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_release(tmp_path))
    analyzer = DocumentAnalyzer(tokenizer, TextOptions(language="zh"))
    document = analyzer.document("x", "预训练语言模型学习知识")
    words = np.split(document.token_starts, np.flatnonzero(annotation("word", document))[1:])
    assert [int(word[0]) for word in words] == [0, 3, 7, 9]  # 预训练 语言模型 学习 知识


def test_lower_casing_before_a_cased_tokenizer_keeps_offsets() -> None:
    tokenizer = train_tokenizer(TRAINING, kind="sentencepiece", vocab_size=170, lower=False)
    document = DocumentAnalyzer(tokenizer, TextOptions(lower=True)).document(
        "x", "NEW İstanbul YORK"
    )
    plain = DocumentAnalyzer(tokenizer, TextOptions()).document("x", "new İstanbul york")
    assert document.ids.tolist() == plain.ids.tolist()
    assert document.text == "NEW İstanbul YORK"
    assert annotation("capital", document).any() and annotation("capital", document)[0] == 1


def test_the_word_cache_is_bounded(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("palm_ds.corpus.analyzer.MOST_WORDS", 5)
    analyzer = DocumentAnalyzer(tokenizer, TextOptions())
    documents = [analyzer.document("x", TEXT) for _ in range(3)]
    assert documents[0].ids.tolist() == documents[2].ids.tolist()
    assert len(analyzer.cache) < 2 * len(set(TEXT.split()))


def test_a_user_defined_annotation(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "module_of_annotations.py").write_text(
        "import numpy as np\n"
        "def even(document): return np.arange(len(document)) % 2 == 0\n"
        "def short(document): return np.zeros(1)\n"
        "def real(document): return np.full(len(document), 0.5)\n"
        "def large(document): return np.full(len(document), 256)\n"
        "class Box:\n    def word(document): ...\nvalue = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    document = ANALYZER.document("x", "the new york")
    name, function = find_annotation("module_of_annotations:even")
    assert name == "even"
    assert find_annotation("odd=module_of_annotations:even") == ("odd", function)
    values = apply_annotation(name, function, document)
    assert values.dtype == np.uint8 and values[:2].tolist() == [1, 0]
    for bad in ("short", "real", "large"):
        with pytest.raises(UserError, match=f"annotation '{bad}': document 'x'"):
            apply_annotation(*find_annotation(f"module_of_annotations:{bad}"), document)
    for bad, message in (
        ("module_of_annotations:nothing", "has no 'nothing'"),
        ("module_of_annotations:value", "is not a function"),
        ("module_of_annotations:Box.word", "a built-in name"),
        ("ids=module_of_annotations:even", "a built-in name"),
        ("no_such_module:x", "cannot import"),
        ("module_of_annotations:", "module:function"),
        ("capitol", "did you mean"),
    ):
        with pytest.raises(UserError, match=message):
            find_annotation(bad)


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [
        ("en/openstax", "vocab_en.txt"),
        ("en/eltec_eng", "vocab_en.txt"),
        ("zh/laws", "vocab.txt"),
        ("zh/wiki_mrc_contexts", "vocab.txt"),
    ],
)
def test_real_documents_have_the_ids_of_the_whole_text(
    name: str, vocabulary: str, shared: Path
) -> None:
    """Words are encoded one by one; the compiled tokenizer on the text as a whole agrees."""
    import json
    from itertools import islice

    tokenizer = load_tokenizer(shared / "data/ernie" / vocabulary)
    analyzer = DocumentAnalyzer(tokenizer, TextOptions())
    with (shared / f"data/corpus/{name}.jsonl").open(encoding="utf-8", newline="\n") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 25)]
    for text, (ids, at) in zip(texts, tokenizer.encode_texts(texts), strict=True):
        document = analyzer.document("x", text)
        assert document.ids.tolist() == ids.tolist()
        assert document.token_starts.tolist() == at.tolist()
        assert 2 <= (annotation("sentence", document) > 0).sum() < len(document) / 4


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("other", "ไปตลาด ซื้อปลา", ["ไ", "ป", "ต", "ลา", "ด", "ซื้", "อ", "ปลา"]),
        ("ja", "東京タワーが見えます", ["東京", "タワー", "が", "見", "え", "ます"]),
        ("mixed", "東京ไป", ["東京", "ไ", "ป"]),
    ],
)
def test_words_where_there_are_no_spaces(language: str, text: str, words: list[str]) -> None:
    """Tokens, but for runs of kanji and katakana; vowel signs and tones stay with their letter."""
    letters = dict.fromkeys("ไปตลดซอื้東京見タワーがえ")
    some = [*letters, *(f"##{letter}" for letter in letters), "##ลา", "##ปลา", "##ます"]
    options = TextOptions(language=language)
    tokenizer = wordpiece([*SPECIALS, *some], lower=False)
    document = DocumentAnalyzer(tokenizer, options).document("x", text)
    assert pieces(document, BUILT_IN["word"](document)) == words
    assert len(document.capitals) == len(document.word_starts) >= len(words)


def test_german_nouns_alone_are_no_entities() -> None:
    text = "Die Deutsche Bank kaufte ein Haus in Bonn."
    tokenizer = train_tokenizer([text] * 2, kind="wordpiece", vocab_size=200)
    document = DocumentAnalyzer(tokenizer, TextOptions(language="de")).document("x", text)
    assert spans(document, BUILT_IN["entity"](document)) == ["Deutsche Bank"]
