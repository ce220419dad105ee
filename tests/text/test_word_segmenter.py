"""ERNIE tiny's tokenizer against a plain restatement of the released algorithm, with the
sentencepiece library."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.text.add_tokens import add_tokens
from palm_ds.text.tokenizer import SPECIALS, Tokenizer, load_tokenizer
from palm_ds.text.word_segmenter import find_word_segmenter
from tests.helpers.ernie_tiny import DICTIONARY, FRONT, TEXTS, write_release

ODD = [
    "",
    "  ",
    "这是个测试样例ABC样例,Hello 世界",
    "\tΑΣ 语言模型\n好",
    "İstanbul语言",
    "学  习",
    "[MASK]语言",
    "🙂学习𠀀",
]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_release(tmp_path_factory.mktemp("ernie_tiny"))


def spm_of(folder: Path) -> Any:
    import sentencepiece as spm

    model = next(folder.rglob("*.model")).read_bytes()
    return spm.SentencePieceProcessor(model_proto=model)


def known(folder: Path) -> dict[str, int]:
    lines = (folder / "vocab.txt").read_text("utf-8").splitlines()
    return {line.split("\t")[0]: number for number, line in enumerate(lines)}


def released_ids(folder: Path, text: str) -> list[int]:
    """WSSPTokenizer of ERNIE's repro branch, and the look-up of its pieces."""
    words, at = [], 0
    while at < len(text):
        for size in (5, 4, 3, 2, 1):
            if text[at : at + size] in DICTIONARY:
                words.append(text[at : at + size])
                break
        else:
            size = 1
            words.append(text[at])
        at += min(size, len(text) - at)
    joined = " ".join(word.lower() for word in words if word != " ")
    found = known(folder)
    return [found.get(piece, found["[UNK]"]) for piece in spm_of(folder).EncodeAsPieces(joined)]


def test_ids_are_those_of_the_released_algorithm(release: Path) -> None:
    tokenizer = load_tokenizer(release)
    assert tokenizer.segmenter is not None and tokenizer.lower
    for text in [*TEXTS, *ODD]:
        assert tokenizer.encode_texts([text])[0][0].tolist() == released_ids(release, text), text
    plain = load_tokenizer(release / "vocab.txt")  # a path instead of a folder
    assert plain.fingerprint == tokenizer.fingerprint


def without_some_pieces(release: Path, folder: Path) -> list[str]:
    """A release whose vocab.txt lacks some pieces; returns its tokens."""
    pieces = [x for text in TEXTS for x in spm_of(release).EncodeAsPieces(text)]
    listed = known(release)
    missing = [*sorted({x for x in pieces if len(x) > 2 and x in listed})[:2], "学"]
    shutil.copytree(release, folder)
    rest = [token for token in listed if token not in missing]
    lines = "".join(f"{token}\t{number}\n" for number, token in enumerate(rest))
    (folder / "vocab.txt").write_text(lines, "utf-8")
    return rest


def test_pieces_that_vocab_txt_lacks_are_unknown(release: Path, tmp_path: Path) -> None:
    """As in ERNIE, which splits a text into them all the same; also after a save."""
    whole = load_tokenizer(release)
    rest = without_some_pieces(release, tmp_path / "tiny")
    tokenizer = load_tokenizer(tmp_path / "tiny")
    tokenizer.save(tmp_path / "saved")
    lost = 0
    for one in (
        tokenizer,
        load_tokenizer(tmp_path / "saved"),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert one.size == len(rest) == whole.size - 3 and one.fingerprint == tokenizer.fingerprint
        assert max(one.vocabulary.regular) < len(rest)
        for text in [*TEXTS, *ODD]:
            ids = one.encode_texts([text])[0][0].tolist()
            assert ids == released_ids(tmp_path / "tiny", text), text
            lost += ids.count(one.vocabulary.unk)
    assert lost and tokenizer.fingerprint != whole.fingerprint
    other = AutoTokenizer.from_pretrained(tmp_path / "saved")  # splits them further, in range
    assert max(max(other(text)["input_ids"], default=0) for text in TEXTS) < len(rest)
    state = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    state["unlisted_pieces"] = [["a"]]
    (tmp_path / "saved/tokenizer_config.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="unlisted_pieces: expected pieces and their scores"):
        load_tokenizer(tmp_path / "saved")


def test_added_tokens_are_not_taken_for_pieces_that_vocab_txt_lacks(
    release: Path, tmp_path: Path
) -> None:
    """Not even one that is such a piece; texts without them have the ids that they had."""
    rest = without_some_pieces(release, tmp_path / "tiny")
    old = load_tokenizer(tmp_path / "tiny")
    added = {"多任务": len(rest), "[ENT]": len(rest) + 1, "学": len(rest) + 2}
    new = add_tokens(old, dict.fromkeys(added, "")).tokenizer
    new.save(tmp_path / "saved")
    for one in (new, load_tokenizer(tmp_path / "saved")):
        assert one.size == len(rest) + 3
        for text in [*TEXTS, *ODD]:
            ids = one.encode_texts([text])[0][0].tolist()
            assert {x for x in ids if x >= len(rest)} == {added[x] for x in added if x in text}
            if "学" not in text:
                assert ids == released_ids(tmp_path / "tiny", text), text


def test_an_added_token_that_the_dictionary_splits_is_refused(release: Path) -> None:
    tokenizer = load_tokenizer(release)
    assert add_tokens(tokenizer, {"多任务": ""}).ids == {"多任务": tokenizer.size}
    with pytest.raises(UserError, match="never be found in a text: its words are '语言 学习'"):
        add_tokens(tokenizer, {"语言学习": ""})


def test_a_folder_of_paddlehub(tmp_path: Path) -> None:
    """One folder, no ids, and more special tokens: none of them is ever drawn as a word."""
    tokenizer = load_tokenizer(write_release(tmp_path, hub=True))
    for text in [*TEXTS, *ODD, "<unk>语言[UNUSED]"]:
        assert tokenizer.encode_texts([text])[0][0].tolist() == released_ids(tmp_path, text), text
    assert [tokenizer.roles[x] for x in ("pad", "unk", "mask", "cls", "sep")] == [
        *("[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]")
    ]
    regular = tokenizer.vocabulary.regular.tolist()
    assert regular == list(range(len(FRONT), tokenizer.size))


def test_spans_are_characters_of_the_text(release: Path) -> None:
    tokenizer = load_tokenizer(release)
    for text in [*TEXTS, "语言  Model 语言 X", "İstanbul 语言"]:
        ids, spans = tokenizer.encode_spans([text])[0]
        assert (np.diff(spans[:, 0]) >= 0).all() and spans.min(initial=0) >= 0
        assert spans.max(initial=0) <= len(text)
        for token, (start, end) in zip(tokenizer.tokens(ids), spans, strict=True):
            if token == "▁":  # SentencePiece's sign by itself
                assert end - start <= 1
            elif token != "[UNK]":
                seen = unicodedata.normalize("NFKC", text[start:end].lower())
                assert token.removeprefix("▁") in seen  # İ is two letters in lower case
        if "[UNK]" not in tokenizer.tokens(ids):
            covered = {place for start, end in spans for place in range(start, end)}
            assert covered == {n for n, letter in enumerate(text) if letter != " "}


def test_a_saved_tokenizer_needs_nothing_else(release: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(release)
    tokenizer.of_length(64).save(tmp_path)
    assert not list(tmp_path.glob("*.pickle"))
    again: Tokenizer = pickle.loads(pickle.dumps(load_tokenizer(tmp_path)))
    assert again.fingerprint == tokenizer.fingerprint
    for text in TEXTS:
        assert again.encode_texts([text])[0][0].tolist() == released_ids(release, text)
    (tmp_path / "words.txt").unlink()
    with pytest.raises(UserError, match="word_segmenter is maximum_match, but its dictionary is"):
        load_tokenizer(tmp_path)


def test_jieba_cuts_the_lower_cased_text(release: Path, tmp_path: Path) -> None:
    """ErnieTinyTokenizer of ERNIE's develop branch, which encodes each word by itself."""
    import rjieba

    write_release(tmp_path, config={"word_segmenter": "jieba"})
    tokenizer, spm, found = load_tokenizer(tmp_path), spm_of(tmp_path), known(tmp_path)
    for text in [*TEXTS, ODD[2]]:
        pieces = [x for word in rjieba.cut(text.lower()) for x in spm.EncodeAsPieces(word)]
        expected = [found.get(piece, found["[UNK]"]) for piece in pieces]
        assert tokenizer.encode_texts([text])[0][0].tolist() == expected, text
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint


def test_characters_are_looked_up_with_the_sign_of_a_word_start(tmp_path: Path) -> None:
    """CharTokenizer of ERNIE's repro branch with `sentencepiece_style_vocab`."""
    write_release(tmp_path, config={"word_segmenter": "characters"})
    tokenizer, found = load_tokenizer(tmp_path), known(tmp_path)

    def released(text: str) -> list[str]:
        out: list[str] = []
        for word in re.findall(r"[a-zA-Z0-9]+|\S", text.lower()):
            start, pieces = 0, []
            while start < len(word):
                sign = "▁" if start == 0 else ""
                ends = range(len(word), start, -1)
                end = next((x for x in ends if sign + word[start:x] in found), None)
                if end is None:
                    pieces = ["[UNK]"]
                    break
                pieces.append(sign + word[start:end])
                start = end
            out += pieces
        return out

    for text in [*TEXTS, *ODD[2:]]:
        ids, spans = tokenizer.encode_spans([text])[0]
        assert ids.tolist() == [found[token] for token in released(text)], text
        starts = [text[start:end].lower() for start, end in spans]
        for token, seen in zip(released(text), starts, strict=True):
            assert token == "[UNK]" or len(text.lower()) > len(text) or seen in token
    labeled = tokenizer.encode_spans(list("语言模型"))  # as tables of tagged characters are
    assert [len(ids) for ids, _ in labeled] == [1, 1, 1, 1]
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (pickle.dumps([Evil()]), r"not a list of words: names .*\.mkdir"),
        (pickle.dumps({"a": Path("x")}), "not a list of words: names pathlib"),
        (b"\x80\x04", "dict.wordseg.pickle: not a list of words: "),
        (pickle.dumps(3), "not a list of words, but int"),
        (pickle.dumps({"far too long": 1, 3: 4}), "lists no words of at most 5 characters"),
    ],
)
def test_a_dictionary_is_read_without_running_it(
    content: bytes, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dict.wordseg.pickle").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        find_word_segmenter(tmp_path, "")
    assert not (tmp_path / "made-by-a-pickle").exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("kind", [set, list, dict.fromkeys])
def test_dictionaries_of_any_protocol(kind: Any, protocol: int, tmp_path: Path) -> None:
    data = io.BytesIO()
    pickle.dump(kind(["语言", "模型"]), data, protocol)
    (tmp_path / "dict.wordseg.pickle").write_bytes(data.getvalue())
    segmenter = find_word_segmenter(tmp_path, "")
    assert segmenter is not None and segmenter.words == {"语言", "模型"}


def test_an_unknown_segmenter(tmp_path: Path) -> None:
    write_release(tmp_path, config={"word_segmenter": "charaters"})
    with pytest.raises(UserError, match="word_segmenter: no 'charaters'; did you mean \"char"):
        load_tokenizer(tmp_path)
    assert SPECIALS[0] in known(tmp_path)
