"""Added tokens: matched in texts, saved in files, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken

from palm_ds.common.errors import UserError
from palm_ds.corpus.analyzer import DocumentAnalyzer
from palm_ds.corpus.options import TextOptions
from palm_ds.text.add_tokens import add_tokens, initializing_ids, read_token_file
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer, wordpiece

SPECIALS = ["[PAD]", "[unused1]", "[unused2]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIALS, *"the new york cov ##id ##s 北 京 在 ,".split()]  # noqa: SIM905
TEXTS = ["the new york", "covids, cov the", "在 北 京", "york [MASK] zzz"]
NEW = dict.fromkeys(["covid", "new york", "北京", "[ENT]", "##idx", "covid-19"], "")


def tokenizer(lower: bool = True) -> Tokenizer:
    return wordpiece(WORDS, lower=lower)


def read(tokens: Tokenizer, text: str) -> list[str]:
    return tokens.tokens(tokens.encode_texts([text])[0][0])


def test_new_tokens_are_found_in_texts_and_old_texts_stay() -> None:
    old = tokenizer()
    added = add_tokens(old, NEW)
    new = added.tokenizer
    assert added.ids == {token: 17 + i for i, token in enumerate(NEW)} and new.size == 23
    assert read(new, "the COVID, covids New  York new york yorknew york") == [
        *("the", "covid", ",", "covid", "##s", "new", "york", "new york"),
        *("[UNK]", "york"),
    ]
    assert read(new, "在北京, covid-19") == ["在", "北京", ",", "covid-19"]
    assert read(new, "covidx") == ["[UNK]"]
    assert read(new, "covididx") == ["covid", "##idx"]
    assert read(new, "[ENT] the") == ["[UNK]", "[UNK]", "[UNK]", "the"]  # texts have no specials
    for text in ("the york", "cov the , 在 北 京", "york [MASK] zzz"):
        assert old.encode_texts([text])[0][0].tolist() == new.encode_texts([text])[0][0].tolist()
    assert old.size == 17 and "covid" not in read(old, "covid")
    assert new.vocabulary.regular.tolist() == [*range(7, 20), 21, 22]  # [ENT] is special


def test_corpora_find_new_tokens_of_several_words() -> None:
    """They encode a text word by word, and Chinese by characters, only without such tokens."""
    text = "the new york, 在北京在 covids. New York"
    for tokens in (NEW, {"covid": "", "##idx": ""}):
        new = add_tokens(tokenizer(), tokens).tokenizer
        (whole,) = new.encode_texts([text])
        document = DocumentAnalyzer(new, TextOptions()).document("one", text)
        assert document.ids.tolist() == whole[0].tolist()
        assert document.token_starts.tolist() == whole[1].tolist()
        assert new.by_word == (tokens is not NEW)


@pytest.mark.parametrize("only", ["tokenizer.json", "vocab.txt"])
def test_files_keep_the_ids(only: str, tmp_path: Path) -> None:
    new = add_tokens(tokenizer(), NEW, reuse_unused=True).tokenizer
    new.save(tmp_path)
    loaded = load_tokenizer(tmp_path / only)
    assert loaded.size == new.size
    assert loaded.tokens(range(new.size)) == new.tokens(range(new.size))
    assert read(loaded, "covids") == ["covid", "##s"]
    if only == "tokenizer.json":
        assert read(loaded, "北京 new york") == ["北京", "new york"]
        assert loaded.fingerprint == new.fingerprint


def test_unused_tokens_are_taken_first() -> None:
    added = add_tokens(tokenizer(), {"a": "", "b": "", "c": ""}, reuse_unused=True)
    assert added.ids == {"a": 1, "b": 2, "c": 17}
    assert added.tokenizer.tokens([1, 2, 3, 17]) == ["a", "b", "[UNK]", "c"]
    assert read(added.tokenizer, "a b c") == ["a", "b", "c"]


def test_known_tokens_are_not_added_again() -> None:
    added = add_tokens(tokenizer(), {"york": "", "a": "", "[SEP]": ""})
    assert added.already_known == ("york", "[SEP]") and added.ids == {"a": 17}


def test_ids_that_initialize_a_token() -> None:
    old = tokenizer()
    assert initializing_ids(old, "covid") == [10, 11] and initializing_ids(old, "北京") == [13, 14]
    assert initializing_ids(old, "##york") == [9] and initializing_ids(old, "[ENT]") == []
    assert initializing_ids(old, "zzz") == [] and initializing_ids(old, "zzz", "the york") == [7, 9]
    assert initializing_ids(old, "the", "zzz") == []


def test_tokens_that_transformers_added_keep_their_ids(tmp_path: Path) -> None:
    theirs = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})
    theirs.add_tokens(["zz", "big dog", AddedToken("[ENT]", special=True)])
    theirs.save_pretrained(tmp_path / "theirs")
    old, text = load_tokenizer(tmp_path / "theirs"), "the zz big dog [ENT] york zzs"
    added = add_tokens(old, {"covid": "", "small dog": ""})
    assert added.ids == {"covid": 20, "small dog": 21}
    added.tokenizer.save(tmp_path / "new")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert again(text)["input_ids"] == theirs(text)["input_ids"]
    for new in (added.tokenizer, load_tokenizer(tmp_path / "new")):
        assert new.encode_words([text]) == old.encode_words([text])
        assert read(new, "covid zz small dog") == ["covid", "zz", "small dog"]


def test_other_vocabularies(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    listed = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "▁the", "▁", "c", "o", "v"]
    unigram = models.Unigram([(piece, -1.0) for piece in listed], 3, False)
    backend = Backend(unigram)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    old = Tokenizer(backend)
    added = add_tokens(old, {"covid": "", "<ent>": ""})
    assert added.ids == {"covid": 10, "<ent>": 11}
    assert "covid" in read(added.tokenizer, "the covid cov")
    added.tokenizer.save(tmp_path)
    assert "covid" in read(load_tokenizer(tmp_path), "the covid")
    with pytest.raises(UserError, match="a unigram vocabulary; only WordPiece has"):
        add_tokens(old, {"x": ""}, reuse_unused=True)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("COVID", "the normalizer turns it into 'covid'; add that"),
        ("New York", "turns it into 'new york'"),
        (" a", "' a' is not a valid token"),
        ("a\x00b", "is not a valid token"),
        ("", "'' is not a valid token"),
    ],
)
def test_tokens_that_never_occur_in_text(token: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        add_tokens(tokenizer(), {token: ""})
    if token == "COVID":
        assert add_tokens(tokenizer(lower=False), {token: ""}).ids == {token: 17}


def test_a_file_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffcovid\tthe virus\r\n\r\n北京\n new york \n".encode())
    assert read_token_file(tmp_path / "a.txt") == {"covid": "the virus", "北京": "", "new york": ""}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"a\nb\na\n", "line 3: duplicate token 'a'"),
        (b"a\n\tb\n", "line 2: no token before the tab"),
        (b"\xff\xfe", "cannot be read as UTF-8"),
        (None, "cannot be read as UTF-8 text: .*No such file"),
    ],
)
def test_a_file_of_something_else(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_token_file(tmp_path / "a.txt")
    assert str(caught.value).startswith(str(tmp_path / "a.txt"))


def test_real_vocabularies(shared: Path) -> None:
    ernie = shared / "data/ernie"
    if not ernie.is_dir():
        pytest.skip("no real vocabularies here")
    for name, token, text in (
        ("vocab.txt", "预训练", "预训练语言模型在北京发布，covid 病毒。"),
        ("vocab_en.txt", "pretraining", "Pretraining of language models, in New York (2019)."),
    ):
        old = load_tokenizer(ernie / name)
        added = add_tokens(old, {token: "", "zzzyx-42": ""}, reuse_unused=name == "vocab_en.txt")
        new = added.tokenizer
        (i, _), (ids, starts) = added.ids.values(), new.encode_texts([text])[0]
        before = old.encode_texts([text])[0][0].tolist()
        assert ids[0] == i and starts[0] == 0
        assert ids[1:].tolist() == before[len(initializing_ids(old, token)) :]
        others = [x for x in text.lower().split() if token not in x]
        assert [x.tolist() for x, _ in new.encode_texts(others)] == [
            x.tolist() for x, _ in old.encode_texts(others)
        ]
