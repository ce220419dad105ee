"""Markers: mining finds what a reader with a list of markers would find, word by word."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from palm_ds.cli.prepare import COMMAND as PREPARE
from palm_ds.common.errors import UserError
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.pretrain.shared.discourse_markers import (
    Finder,
    Marker,
    mine,
    plain_name,
    read_markers,
    spellings,
)
from palm_ds.text.tokenizer import Tokenizer, wordpiece
from tests.helpers.pair_corpus import (
    SPECIALS,
    list_file,
    slow_pairs,
    tokenizer_of,
    write_jumble,
    write_sentences,
)


def words_of(corpus: Corpus, start: int, end: int) -> str:
    return " ".join(corpus.tokenizer().tokens(corpus.read(start, end, ()).ids))


# By hand ---------------------------------------------------------------------------------------

ENGLISH = [
    ("a", ["# However , a title about rain",  # a heading is not a sentence of the text
           "It rained all night long .",
           "However , the match was played at noon .",
           "So-called fans stayed at home .",  # so-called is not "so"
           "In fact the whole town was there .",
           "In addition to them came the mayor .",  # this one wants its comma
           "But , in addition , it snowed on them .",  # the longest at the beginning
           "As a result : nobody could see the ball .",
           "Still waters run deep , they say .",
           "Still , the crowd was cheerful and loud .",
           "Soon ."]),  # too short
    ("b", ["However , a document cannot begin with one .",
           "In other words they were all very late .",
           "Butter was sold by the pound there .",
           "Yes .",
           "But the sentence before is too short ."]),
]  # fmt: skip
LIST = (
    "however,\nso\nin fact | in other words\nin addition,\nbut\nas a result\nstill,\nsoon\nbut no\n"
)


@pytest.mark.parametrize("lower", [True, False])
def test_pairs_of_english_by_hand(tmp_path, lower):
    tokenizer = tokenizer_of(*(t for _, texts in ENGLISH for t in texts), "however in", lower=lower)
    corpus = write_sentences(tmp_path / "corpus", ENGLISH, tokenizer)
    classes = read_markers(list_file(tmp_path, LIST), "x")
    finder = Finder.of(classes, corpus)
    found = [
        (words_of(corpus, a, b), classes[k][0].text, words_of(corpus, c, d))
        for table in mine(corpus, finder, shortest=3, unmarked=-1)
        for a, b, c, d, k in table.tolist()
    ]
    expected = [
        ("It rained all night long .", "however", "the match was played at noon ."),
        ("So - called fans stayed at home .", "in fact", "the whole town was there ."),
        ("In addition to them came the mayor .", "but", "in addition , it snowed on them ."),
        ("But , in addition , it snowed on them .", "as a result", "nobody could see the ball ."),
        ("Still waters run deep , they say .", "still", "the crowd was cheerful and loud ."),
        ("However , a document cannot begin with one .", "in fact", "they were all very late ."),
    ]
    if lower:
        expected = [(a.lower(), marker, b.lower()) for a, marker, b in expected]
    assert found == expected


def test_pairs_of_chinese_by_hand(tmp_path):
    # White space is where the segmenter splits.
    texts = [
        "天气 很 好 。",
        "但是 ， 他们 没有 出门 。",
        "但丁 是 诗人 。",
        "换句话说 他 写 诗 。",
    ]
    texts += ["例如 ： 神曲 是 他 的 作品 。", "但 没有 人 读 。", "因此 书 都 旧 了 。"]
    corpus = write_sentences(tmp_path / "corpus", [("x", texts)], tokenizer_of(*texts))
    classes = read_markers("zh", "x")
    (table,) = mine(corpus, Finder.of(classes, corpus), shortest=3, unmarked=-1)
    found = [(classes[row[4]][0].text, words_of(corpus, row[2], row[3])) for row in table.tolist()]
    assert found == [
        ("但是", "他 们 没 有 出 门 。"),  # 但丁, Dante, is not 但
        ("也就是说", "他 写 诗 。"),
        ("例如", "神 曲 是 他 的 作 品 。"),
        ("但是", "没 有 人 读 。"),
        ("因此", "书 都 旧 了 。"),
    ]


# A slow re-implementation ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def jumble(tmp_path_factory) -> Corpus:
    return write_jumble(tmp_path_factory.mktemp("jumble") / "corpus")


@pytest.mark.parametrize("shortest", [1, 4])
def test_mining_agrees_with_a_slow_reading_of_a_jumble(jumble, tmp_path, shortest):
    classes = read_markers(
        list_file(tmp_path, "but\nand\nin fact\nin other words | as a result,\nso\nstill,\nin"), "x"
    )
    finder = Finder.of(classes, jumble)
    found = [tuple(row) for t in mine(jumble, finder, shortest=shortest, unmarked=-1) for row in t]
    slow = slow_pairs(jumble, classes, shortest)
    assert len(slow) > 80
    assert [(a, c, d, k) for a, _, c, d, k in found] == [(a, c, d, k) for a, _, c, d, k in slow]


@pytest.mark.slow
def test_mining_agrees_with_a_slow_reading_of_real_english(shared_en):
    classes = read_markers("en", "x")
    (table,) = mine(shared_en, Finder.of(classes, shared_en), shortest=5, unmarked=-1)
    slow = slow_pairs(shared_en, classes, 5)
    assert len(slow) > 3000
    assert list(map(tuple, table.tolist())) == slow


@pytest.mark.slow
def test_mining_finds_chinese_markers(shared_zh):
    classes = read_markers("zh", "x")
    (table,) = mine(shared_zh, Finder.of(classes, shared_zh), shortest=5, unmarked=-1)
    tokenizer = shared_zh.tokenizer()
    known = {m.text: label for label, line in enumerate(classes) for m in line}
    assert len(table) > 1000
    for _, end, second, _, label in table.tolist():
        marker = "".join(tokenizer.tokens(shared_zh.read(end, second, ()).ids)).rstrip(",，：:")
        assert known[marker] == label


def test_large_corpora_are_searched_in_parts(jumble, monkeypatch, tmp_path):
    classes = read_markers(list_file(tmp_path, "but\nand\nso"), "x")
    finder = Finder.of(classes, jumble)
    (whole_table,) = mine(jumble, finder, shortest=1, unmarked=-1)
    monkeypatch.setattr("palm_ds.pretrain.shared.discourse_markers._CHUNK", 7)
    parts = list(mine(jumble, finder, shortest=1, unmarked=-1))
    assert len(parts) > 20
    assert np.array_equal(np.concatenate(parts), whole_table)


# Lists -----------------------------------------------------------------------------------------


def test_reading_a_list_of_markers(tmp_path):
    text = "# mine\nhowever\n\nAs_a_result, | so,  # two of one class\n但是\n"
    assert read_markers(list_file(tmp_path, text), "x") == [
        [Marker("however", False)],
        [Marker("as a result", True), Marker("so", True)],
        [Marker("但是", False)],
    ]


def test_spellings_cover_capitals_and_preceding_spaces():
    cased = wordpiece([*SPECIALS, "But", "but", "##ter", "B", "##ut"], lower=False)
    assert spellings("but", cased) == [(6,), (5,)]
    assert spellings("never", cased) == []  # cannot be written
    chinese = tokenizer_of("但是")
    assert [chinese.tokens(ids) for ids in spellings("但是", chinese)] == [["但", "是"]]


def test_a_marker_with_unknown_tokens_is_not_searched_for():
    """Pieces merge unknown characters: of "。但是" only "是" may remain as known."""
    backend = Backend(models.Unigram([*((t, -9.0) for t in SPECIALS), ("是", -1.0)], 1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    pieces = Tokenizer(backend)
    assert pieces.tokens(pieces.encode_texts(["。但是"])[0][0]) == ["[UNK]", "是"]
    assert spellings("但是", pieces) == []
    assert spellings("是", pieces) == [(5,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 markers"),
        ("# nothing\nbut\n", "1 marker; expected at least 2"),
        ("but\nso\n\nBut,\n", "line 4: 'but' is already on line 1"),
        ("but\nso | \n", "line 2: a marker is empty"),
        ("but\nso\n,\n", "line 3: a marker is empty"),
    ],
)
def test_a_wrong_list_is_one_clear_line(tmp_path, text, message):
    file = list_file(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_markers(file, "tasks.t.markers")
    said = str(error.value)
    assert said.startswith(f"tasks.t.markers: {file}: ") and message in said
    assert "\n" not in said


@pytest.mark.parametrize(("name", "classes"), [("en", 180), ("zh", 110)])
def test_the_built_in_lists_are_long_and_clean(name, classes):
    lines = read_markers(name, "x")
    assert len(lines) >= classes
    for marker in (marker for line in lines for marker in line):
        chinese = [c for c in marker.text if "\u4e00" <= c <= "\u9fff"]
        assert bool(chinese) == (name == "zh")
        assert marker.text == marker.text.strip().lower()


def test_the_built_in_lists_cover_published_ones(shared):
    """How much of other lists they contain; they classify words differently, so not all."""
    own = {m.text for line in read_markers("en", "x") for m in line}
    folder = shared / "data/lexicon"
    for file, share in (("discovery_markers_list", 0.8), ("discovery_pdtb_markers_list", 0.85)):
        lines = (folder / f"en/{file}.txt").read_text().split("\n")
        others = {plain_name(line) for line in lines} - {"", "[no-conn]"}
        assert len(others & own) / len(others) > share, sorted(others - own)
    chinese = json.loads((folder / "dissent_markers.json").read_text())["CH_ALL_DISCOURSE_MARKERS"]
    own = {m.text for line in read_markers("zh", "x") for m in line}
    assert len(set(chinese) & own) / len(set(chinese)) > 0.5, sorted(set(chinese) - own)


def test_the_lists_are_in_the_built_package(root, tmp_path):
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(root / "palm_ds", tmp_path / "palm_ds")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "built"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {path.name for path in (tmp_path / "built/palm_ds/pretrain/markers").iterdir()}
    assert built == {"en.txt", "zh.txt"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_another_tokenizer_finds_the_same_markers(shared, tmp_path, language):
    """With capitals in words and tokens that include the space before them."""
    name = {"en": "en/wikitext2_valid", "zh": "zh/niutrans_modern_from_classical"}[language]
    lines = (shared / f"data/corpus/{name}.jsonl").read_text("utf-8").split("\n")
    (tmp_path / "some.jsonl").write_text("\n".join(lines[:20] if language == "en" else lines[::40]))
    vocabulary = shared / "data/ernie" / {"en": "vocab_en.txt", "zh": "vocab.txt"}[language]
    tokenizers = {"lower": ["--lower", "--tokenizer", str(vocabulary)]}
    tokenizers["pieces"] = ["--train", "sentencepiece", "--vocab_size", "6000"]
    found = {}
    for tokenizer, options in tokenizers.items():
        folder = tmp_path / tokenizer
        options = [*options, "--language", language]
        PREPARE.call([str(folder), str(tmp_path / "some.jsonl"), *options])
        corpus, classes = open_corpus(folder), read_markers(language, "x")
        (table,) = mine(corpus, Finder.of(classes, corpus), shortest=3, unmarked=-1)
        sentence = np.searchsorted(corpus.sentence_starts, table[:, 1])
        found[tokenizer] = set(zip(sentence.tolist(), table[:, 4].tolist(), strict=True))
    assert len(found["lower"]) > 50
    different = found["lower"] ^ found["pieces"]
    assert len(different) <= 0.02 * len(found["lower"]), different
