"""The exported tokenizer reads raw text as a corpus did: transformers gives the corpus's ids."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

from palm_ds.corpus.analyzer import DocumentAnalyzer
from palm_ds.corpus.options import TextOptions
from palm_ds.data.tasks.example import build_input
from palm_ds.text.add_tokens import add_tokens
from palm_ds.text.chinese import find_simplifier
from palm_ds.text.exported_tokenizer import (
    _words,
    normalizing_tokenizer,
    only_here,
    other_inputs,
)
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer, wordpiece
from palm_ds.text.tokens import TokenSpan
from tests.helpers.ernie_tiny import write_release

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def characters(texts: str) -> Tokenizer:
    return wordpiece([*SPECIALS, *sorted(set(texts))], lower=False)


def test_traditional_text_by_words(tmp_path: Path) -> None:
    text = "乾隆皇帝在臺灣有乾淨的頭髮，憑藉歷史 A"
    tokenizer = normalizing_tokenizer(
        characters(find_simplifier()(text).lower()), simplify=True, lower=True
    )
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert "".join(theirs.tokenize(text)) == "乾隆皇帝在台湾有干净的头发，凭借历史a"
    again = load_tokenizer(tmp_path)
    encoded = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    assert again.encode_words([text]) == [encoded["input_ids"]]
    places = [(at, at + 1) for at, letter in enumerate(text) if letter != " "]
    assert encoded["offset_mapping"] == places  # those of 乾 and 憑, which depend on words, too
    assert [tuple(span) for span in again.encode_spans([text])[0][1].tolist()] == places


def test_added_tokens_are_matched_in_prepared_text(tmp_path: Path) -> None:
    """Chinese words too, whose characters a WordPiece tokenizer takes one by one."""
    tokenizer = characters("他在计算机上用芯片和训练的ai芯,")
    new = add_tokens(tokenizer, dict.fromkeys(["计算机", "ai芯片", "deepspeed"], "")).tokenizer
    text = "他在計算機上用AI芯片和DeepSpeed訓練, 計 算 機的計算機計算機"
    options = TextOptions(simplify=True, lower=True)
    wanted = DocumentAnalyzer(new, options).document("one", text)
    exported = normalizing_tokenizer(new, simplify=True, lower=True)
    exported.save(tmp_path)
    for each in (exported, load_tokenizer(tmp_path)):
        ids, places = each.encode_texts([text])[0]
        assert ids.tolist() == wanted.ids.tolist()
        assert places.tolist() == wanted.token_starts.tolist()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text, add_special_tokens=False)["input_ids"] == wanted.ids.tolist()
    assert sum(wanted.ids >= tokenizer.size) == 5


@pytest.mark.parametrize("kind", ["maximum_match", "jieba"])
def test_words_are_split_from_simplified_texts(kind: str, tmp_path: Path) -> None:
    """ERNIE tiny's, as a corpus does it."""
    text = "自然語言處理是人工智能的一個方向，深度學習框架支持多任務學習"
    tokenizer = load_tokenizer(write_release(tmp_path / "tiny", {"word_segmenter": kind}))
    options = TextOptions(simplify=True)
    wanted = DocumentAnalyzer(tokenizer, options).document("one", text).ids.tolist()
    exported = normalizing_tokenizer(tokenizer, simplify=True)
    exported.save(tmp_path / "hf")
    again = load_tokenizer(tmp_path / "hf")
    for each in (exported, again, pickle.loads(pickle.dumps(exported))):
        ids, places = each.encode_texts([text])[0]
        assert ids.tolist() == wanted and places.max() < len(text)
        assert each.fingerprint == exported.fingerprint != tokenizer.fingerprint
    assert normalizing_tokenizer(again, simplify=True) is again
    assert "do not simplify texts and split texts into words" in only_here(again)[0]


def test_nothing_to_do_is_the_same_tokenizer() -> None:
    tokenizer = wordpiece([*SPECIALS, "a"], lower=True)
    assert normalizing_tokenizer(tokenizer, simplify=False, lower=True) is tokenizer


def test_a_letter_that_would_become_two_stays_as_in_corpora() -> None:
    """Lower-cased, the Turkish capital I with a dot is an i and a combining dot."""
    text = "\u0130stanbul VE \u0130zmir"
    tokenizer = wordpiece([*SPECIALS, "\u0130stanbul", "\u0130zmir", "ve"], lower=False)
    wanted = DocumentAnalyzer(tokenizer, TextOptions(lower=True)).document("one", text).ids
    exported = normalizing_tokenizer(tokenizer, lower=True)
    ((ids, _),) = exported.encode_texts([text])
    assert ids.tolist() == wanted.tolist() and tokenizer.vocabulary.unk not in ids


def test_a_greek_word_in_capitals_is_lower_cased_as_in_corpora(tmp_path: Path) -> None:
    """By letter, as in transformers: σ at the end, too."""
    text = "Ο ΛΟΓΟΣ ΤΗΣ Πόλης, ΟΔΟΣ"
    words = ["ο", "λογο", "##σ", "##ς", "τη", "πόλη", ",", "οδοσ", "οδος"]
    tokenizer = wordpiece([*SPECIALS, *words], lower=False)
    wanted = DocumentAnalyzer(tokenizer, TextOptions(lower=True)).document("one", text).ids
    normalizing_tokenizer(tokenizer, lower=True).save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text, add_special_tokens=False)["input_ids"] == wanted.tolist()


@pytest.mark.parametrize(
    ("single", "pair"),
    [
        ("$A", "$A $B:1"),
        ("$A [SEP]", "$A [SEP] $B [SEP]"),
        ("[CLS] $A", "[CLS] $A $B:1"),
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] [CLS] $B [SEP]"),
        ("[MASK] $A [SEP]", "[MASK] $A [SEP] $B:1 [SEP]:1"),
    ],
)
def test_inputs_are_those_of_training(single: str, pair: str, tmp_path: Path) -> None:
    tokenizer = wordpiece([*SPECIALS, "A", "1", "2"], lower=False)
    numbered = [(token, number) for number, token in enumerate(SPECIALS)]
    tokenizer.backend.post_processor = processors.TemplateProcessing(single, pair, numbered)
    assert f'makes "{single.replace("$", "")}" of a text' in other_inputs(tokenizer)
    pieces = [TokenSpan(0, ids) for ids, _ in tokenizer.encode_texts(["1", "2"])]
    wanted = [build_input(pieces[:many], tokenizer.vocabulary) for many in (1, 2)]
    exported = normalizing_tokenizer(tokenizer)
    assert not other_inputs(exported)
    exported.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for right, found in zip(wanted, (theirs("1"), theirs("1", "2")), strict=True):
        assert found["input_ids"] == right.input_ids.tolist()
        assert found["token_type_ids"] == right.token_type_ids.tolist()


def test_offsets_stay_without_the_space_in_front(tmp_path: Path) -> None:
    backend = Backend(models.BPE({x: i for i, x in enumerate([*SPECIALS, "A", "Ġ"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    normalizing_tokenizer(Tokenizer(backend)).save(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)("A A", return_offsets_mapping=True)
    assert found["input_ids"] == [2, 5, 6, 5, 3]
    assert found["offset_mapping"][1:-1] == [(0, 1), (2, 2), (2, 3)]


def test_words_are_converted_otherwise_than_their_characters() -> None:
    """The list fits the installed OpenCC: each word needs its place in it."""
    simplify, words = find_simplifier(), _words()
    assert len(words) > 400 and words == sorted(words, key=lambda word: (-len(word), word))
    for word in words:
        assert len(simplify(word)) == len(word)
        assert simplify(word) != "".join(map(simplify, word)), word


@pytest.mark.slow
def test_real_traditional_text_gives_the_ids_of_its_corpus(shared: Path) -> None:
    data = json.loads((shared / "data/finetune/zh/drcd/DRCD_dev.json").read_text("utf-8"))
    texts = [x["context"] for article in data["data"] for x in article["paragraphs"]][:300]
    tokenizer = load_tokenizer(shared / "data/ernie/vocab.txt")
    exported = normalizing_tokenizer(tokenizer, simplify=True, lower=False)
    wanted = [
        ids.tolist() for ids, _ in tokenizer.encode_texts(list(map(find_simplifier(), texts)))
    ]
    assert [ids.tolist() for ids, _ in exported.encode_texts(texts)] == wanted
